"""Forecasts two series with an MLSTMStack and with nn.LSTM, on a CPU, in a few minutes.

    python examples/forecasting.py

`waves` is a sum of three sines with noise. `load` has the shape of an hourly electricity load: a
day, a week and a year, a slow trend, random days off, and weather that lasts for days. Both models
read one day (24 values) per position and predict the next day at every position. They are trained
on the first part of each series. On the rest they read four weeks, then stream: they forecast three
days, each from the forecast of the day before. Printed is the mean absolute error of these three
days in standard deviations, and that of repeating the values of a day or a week before.
"""

import argparse
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from xlstm7b import MLSTMStack

DAY, CONTEXT, HORIZON = 24, 28, 3  # hours; days that are read, days that are forecast


def waves(length: int, random: torch.Generator) -> Tensor:
    t = torch.arange(length)
    periods = torch.tensor([[24.0], [37.0], [110.0]])
    series = torch.sin(2 * math.pi * t / periods).sum(0)
    return series + 0.2 * torch.randn(length, generator=random)


def load(length: int, random: torch.Generator) -> Tensor:
    hour = torch.arange(length)
    day, week = hour % 24, hour // 24 % 7
    days = length // 24 + 1
    off = (week >= 5) | (torch.rand(days, generator=random) < 0.03)[hour // 24]
    shape = torch.exp(-(((day - 13) / 5.0) ** 2)) + 0.6 * torch.exp(-(((day - 20) / 2.0) ** 2))
    weather, noise = torch.zeros(length), 0.05 * torch.randn(length, generator=random)
    for t in range(1, length):
        weather[t] = 0.98 * weather[t - 1] + noise[t]
    year = 0.3 * torch.cos(2 * math.pi * hour / 8766)
    return 1 + shape * torch.where(off, 0.6, 1.0) + year + 1e-5 * hour + weather


class Forecaster(nn.Module):
    """The next day at every position: `days, state = model(days, state)` with days [B, T, 24]."""

    def __init__(self, recurrent: nn.Module, dim: int) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(DAY, dim), nn.Linear(dim, DAY)
        self.recurrent = recurrent

    def forward(self, days: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.recurrent(self.input(days), state)
        return self.output(y), state


def models(dim: int) -> dict[str, Forecaster]:
    """Both have two layers and about as many parameters."""
    stack = MLSTMStack(dim, num_heads=4, num_blocks=2, dropout=0.1, igate_bias_init_range=-2.0)
    wide = int(1.2 * dim)
    lstm = nn.LSTM(wide, wide, num_layers=2, batch_first=True, dropout=0.1)
    return {"MLSTMStack": Forecaster(stack, dim), "nn.LSTM": Forecaster(lstm, wide)}


def train(model: Forecaster, series: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    windows = series.unfold(0, (CONTEXT + 1) * DAY, 1)  # they start at any hour
    for _ in range(steps):
        days = windows[torch.randint(len(windows), (32,))].unflatten(1, (-1, DAY))
        predicted, _ = model(days[:, :-1])
        loss = nn.functional.smooth_l1_loss(predicted, days[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def forecast(model: Forecaster, days: Tensor) -> Tensor:
    """The days after `days` [B, T, 24]: reads them once, then goes on one position at a time."""
    predicted, state = model(days)
    found = [predicted[:, -1:]]
    while len(found) < HORIZON:
        predicted, state = model(found[-1], state)
        found.append(predicted)
    return torch.cat(found, dim=1)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps of each model")
    parser.add_argument("--dim", type=int, default=48, help="width of the stack")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    random, errors = torch.Generator().manual_seed(0), {}
    for name, make in (("waves", waves), ("load", load)):
        series = make(600 * DAY, random)
        known, unknown = series[: 500 * DAY], series[500 * DAY :]
        mean, std = known.mean(), known.std()
        cases = ((unknown - mean) / std).unfold(0, (CONTEXT + HORIZON) * DAY, DAY)
        before, after = cases.unflatten(1, (-1, DAY)).split([CONTEXT, HORIZON], dim=1)

        def error(predicted: Tensor, wanted: Tensor = after) -> float:
            return (predicted - wanted).abs().mean().item()

        errors[name] = {
            "a day before": error(before[:, -1:].expand_as(after)),
            "a week before": error(before[:, -7 : HORIZON - 7]),
        }
        for kind, model in models(options.dim).items():
            start = time.perf_counter()
            train(model, (known - mean) / std, options.steps)
            seconds = time.perf_counter() - start
            errors[name][kind] = error(forecast(model, before))
            size = sum(parameter.numel() for parameter in model.parameters())
            print(f"{name}: {kind}, {size:,} parameters, trained in {seconds:.0f} s")
        for kind, found in errors[name].items():
            print(f"    {kind:14} {found:.3f}")
    return errors


if __name__ == "__main__":
    main()
