"""Variable tracking: a chain of assignments, hidden in noise, is to be followed to its end."""

from itertools import pairwise
from random import Random
from string import ascii_uppercase

from xlstm7b.evaluate.ruler.fitting import Draft
from xlstm7b.evaluate.ruler.needles import NOISE, scattered

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {value}, they are:"
)
_HOPS = 4
_EXAMPLE_LINES = 10  # about 500 tokens, as the benchmark's


def build_chain(rng: Random, size: int) -> Draft:
    """A solved example with names of 3 letters, then a chain with names of 5 in so much noise."""
    example = _chain(rng, 3, _EXAMPLE_LINES)
    asked = _chain(rng, 5, size)
    solved = f"{example.prompt} {' '.join(example.references)}"
    return Draft(f"{solved}\n\n{asked.prompt}", asked.references)


def _chain(rng: Random, letters: int, size: int) -> Draft:
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices(ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = rng.randrange(10_000, 100_000)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    context = "\n".join(scattered(rng, chain, [NOISE] * size))
    prompt = _TEMPLATE.format(context=context, value=value, count=len(names))
    return Draft(prompt, tuple(names))
