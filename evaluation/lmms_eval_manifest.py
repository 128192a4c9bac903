"""The entry point `lmms_eval.models`; apart from the model's module, so that either can be imported first."""

from lmms_eval.models.registry_v2 import ModelManifest


MANIFEST = ModelManifest(model_id="image_text_to_text", chat_class_path="evaluation.lmms_eval_model.ImageTextToText")
