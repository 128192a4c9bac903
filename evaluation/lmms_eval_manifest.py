"""What the entry point `lmms_eval.models` names: apart from the model, which can then be imported first, too."""

from lmms_eval.models.registry_v2 import ModelManifest


MANIFEST = ModelManifest(model_id="image_text_to_text", chat_class_path="evaluation.lmms_eval_model.ImageTextToText")
