"""The relative error of a tensor."""

from torch import Tensor


def error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64; NaN if one of them contains NaN."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-300))
