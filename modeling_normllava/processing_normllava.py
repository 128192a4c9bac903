"""NormLlava's processor for models whose pictures are cut into tiles.

Saving such a processor copies this file into the checkpoint folder. Models without tiles have Llava's own processor.
"""

from typing import Any

from transformers import LlavaProcessor
from transformers.processing_utils import MultiModalData


class NormLlavaProcessor(LlavaProcessor):
    """[`LlavaProcessor`] with an image processor that cuts pictures into tiles, such as GotOcr2's.

    The image processor resizes a picture to the grid of tiles that is nearest to the picture's shape. Each tile has
    the size that the vision encoder takes. If the grid has two tiles or more, the whole picture follows them as one
    more tile, the thumbnail. In `pixel_values` the tiles of all pictures follow each other. In transformers' names
    (`num_patches`, `num_image_patches`, `max_patches`), "patches" are tiles.

    In the prompt, one image token stands for a picture. The processor repeats the token as often as the vision encoder
    has patches (or squares of merged patches) for all the picture's tiles.
    """

    @property
    def unused_input_names(self) -> list[str]:
        """Outputs of the image processor that aren't inputs of the model."""
        return ["num_patches"]

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        """The image tokens of one picture, as text.

        Args:
            image_inputs: The image processor's output. Its `num_patches` has the number of tiles of each picture.
            image_idx: The picture's number among the pictures of the call, from 0.
        """
        # All tiles have the same size, so all have the image tokens of tile 0.
        text_of_tile = super().replace_image_token(image_inputs, 0, **kwargs)
        num_tiles = int(image_inputs["num_patches"][image_idx])
        return text_of_tile * num_tiles

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **kwargs: Any) -> MultiModalData:
        """The numbers of image tokens (`num_image_tokens`) and of tiles (`num_image_patches`) of each picture.

        vLLM and training call this method.

        Args:
            image_sizes: Height and width of each picture, in pixels.
            kwargs: Options of the image processor, such as `max_patches`, the largest number of tiles in a grid.
        """
        if not image_sizes:
            return MultiModalData()

        num_tiles = []
        for height, width in image_sizes:
            tiles_of_picture = self.image_processor.get_number_of_image_patches(height, width, kwargs)
            num_tiles.append(tiles_of_picture)

        # For a picture of any size, Llava's processor counts the image tokens of one tile.
        (tokens_per_tile,) = super()._get_num_multimodal_tokens(image_sizes[:1]).num_image_tokens
        num_image_tokens = [tokens_per_tile * tiles for tiles in num_tiles]
        return MultiModalData(num_image_tokens=num_image_tokens, num_image_patches=num_tiles)


NormLlavaProcessor.register_for_auto_class()
