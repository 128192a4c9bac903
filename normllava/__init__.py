"""What people who train vision-language models take along: scale a projector, watch a model's norms, add the norm."""

import logging


# transformers imports bitsandbytes where it is installed, which then warns of a kernel that a CPU lacks.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

from normllava.llava import add_norm
from normllava.monitor import NormMonitor
from normllava.projector import ScaledProjector, scale_projector


__all__ = ["NormMonitor", "ScaledProjector", "add_norm", "scale_projector"]
