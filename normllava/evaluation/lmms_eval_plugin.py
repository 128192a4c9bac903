"""Tells lmms-eval of the model `image_text_to_text`. lmms-eval finds this by the entry points in pyproject.toml.

lmms-eval imports this module whenever it starts, and the module of the model only if the model is chosen.
"""

from lmms_eval.models.registry_v2 import ModelManifest


MANIFEST = ModelManifest("image_text_to_text", chat_class_path="normllava.evaluation.lmms_eval_model.ImageTextToText")
