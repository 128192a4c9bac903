"""What people who train vision-language models take along: scale a projector, watch a model's norms, add the norm."""

from normllava.llava import add_norm
from normllava.monitor import NormMonitor
from normllava.projector import ScaledProjector, scale_projector


__all__ = ["NormMonitor", "ScaledProjector", "add_norm", "scale_projector"]
