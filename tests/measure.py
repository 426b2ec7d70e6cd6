"""How the tests compare numbers."""

from torch import Tensor


def error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64; NaN where either holds one."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-300))
