"""Search: the same outputs and scores as from reading everything again without a state."""

import re
from itertools import product

import pytest
import torch

from xlstm7b.config import ModelConfig
from xlstm7b.generate import Engine, Generator
from xlstm7b.generate.search import Tree, beam_search, best_of_n, self_consistency, tree_search
from xlstm7b.model import XLSTM
from xlstm7b.tokenizer import ByteTokenizer

EOS, NEWLINE = 3, ByteTokenizer().encode("\n")[0]
PROMPT = [5, 31, 22, 8, 19]


@torch.no_grad()
def drawn(vocab_size: int = 40) -> XLSTM:
    """Random weights at a scale where gates matter and no token is certain."""
    model = XLSTM(ModelConfig(64, 2, 2, vocab_size=vocab_size, eos_token_id=EOS))
    for name, parameter in model.named_parameters():
        if name.endswith("gate_preact.bias"):
            parameter.uniform_(-2, 4)
        elif parameter.dim() == 2:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    model.lm_head.weight[EOS] *= 2  # end of text: likely after some tokens, unlikely after others
    return model


@pytest.fixture(scope="module")
def model() -> XLSTM:
    torch.manual_seed(1)
    return drawn()


@pytest.fixture(scope="module")
def generator(model) -> Generator:
    return Generator(model, ByteTokenizer(), batch_size=3)


@pytest.fixture
def reads(monkeypatch) -> list[list[int]]:
    """Every prompt that an engine is given; continuations of a state have none."""
    read, add_request = [], Engine.add_request

    def recorded(self, request):
        add_request(self, request)
        if request.prompt_token_ids:
            read.append(request.prompt_token_ids)

    monkeypatch.setattr(Engine, "add_request", recorded)
    return read


@torch.no_grad()
def logprob(model: XLSTM, prompt: list[int], ids: list[int]) -> float:
    """The log-probability of `ids` after the prompt, from one pass over everything."""
    logits, _ = model(torch.tensor([[0, *prompt, *ids]]))
    logprobs = logits[0].double().log_softmax(-1)[len(prompt) : -1]
    return float(logprobs.gather(1, torch.tensor(ids)[:, None]).sum())


def said(completion) -> list[int]:
    """The tokens of an output, with the end of text if it ended with it."""
    return completion.token_ids + [EOS] * (completion.finish_reason == "stop")


def close(value: float):
    return pytest.approx(value, abs=2e-4)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0])
def test_best_of_n_ranks_by_recomputed_logprobs(model, generator, reads, length_penalty):
    sampling = {"max_new_tokens": 12, "temperature": 1.3}
    ranked = best_of_n(generator, PROMPT, 8, length_penalty=length_penalty, seed=4, **sampling)
    assert reads == [[0, *PROMPT]]
    again = [generator.generate([PROMPT], seed=4 + n, **sampling)[0] for n in range(8)]
    assert {c.finish_reason for c in again} == {"stop", "length"}
    assert {len(c.token_ids) for c in again} > {12}
    want = sorted(
        (-logprob(model, PROMPT, said(c)) / len(said(c)) ** length_penalty, c.text) for c in again
    )
    assert [c.text for _, c in ranked] == [text for _, text in want]
    assert [score for score, _ in ranked] == [close(-worth) for worth, _ in want]
    for _, completion in ranked:
        assert completion.prompt_tokens == 6
        assert completion.prompt_tokens_per_second > 0
        assert completion.state is None


def test_the_score_of_an_empty_output_is_that_of_its_end_of_text(model, generator):
    sure = {"logit_bias": {EOS: 100}, "seed": 0}
    [(score, completion)] = best_of_n(generator, PROMPT, 1, **sure)
    assert completion.token_ids == []
    assert score == close(logprob(model, PROMPT, [EOS]))
    either = logprob(model, PROMPT, [EOS]), logprob(model, PROMPT, [9])
    [(score, _)] = best_of_n(generator, PROMPT, 1, eos_token_id=[EOS, 9], **sure)
    assert score == close(torch.tensor(either).logsumexp(0).item())


def test_an_output_that_ends_with_a_stop_string_has_no_end_of_text(model, generator):
    bias = {NEWLINE: 100.0}
    [(score, completion)] = best_of_n(generator, PROMPT, 1, stop_strings="\n", logit_bias=bias)
    assert (completion.text, completion.finish_reason) == ("", "stop")
    assert completion.token_ids == [NEWLINE]
    assert score == close(logprob(model, PROMPT, [NEWLINE]))


def test_best_of_n_with_a_score_function(generator):
    prompts = []

    def score(prompt, completion):
        prompts.append(prompt)
        return len(set(completion.token_ids))

    ranked = best_of_n(generator, "\x03\x1d", 5, score=score, max_new_tokens=9, seed=1)
    assert prompts == ["\x03\x1d"] * 5
    scores = [score for score, _ in ranked]
    assert scores == sorted(scores, reverse=True) == [len({*c.token_ids}) for _, c in ranked]
    assert len({*scores}) > 1
    best_of_n(generator, [4, 30], 1, score=score, max_new_tokens=1)
    assert prompts[-1] == "\x02\x1c"


def test_a_prompt_on_top_of_a_state(generator, reads):
    sampling = {"max_new_tokens": 6, "seed": 2}
    want = best_of_n(generator, PROMPT, 4, **sampling)
    start = generator.read([PROMPT[:3]])
    reads.clear()
    for prompt, state in ((PROMPT[3:], start), (None, generator.read([PROMPT[3:]], state=start))):
        got = best_of_n(generator, prompt, 4, state=state, **sampling)
        assert [c.text for _, c in got] == [c.text for _, c in want]
        assert [score for score, _ in got] == [close(score) for score, _ in want]
        assert got[0][1].prompt_tokens == len(prompt or ())
    assert reads == [PROMPT[3:], PROMPT[3:]]


def test_votes(generator):
    def vote(answers):
        return self_consistency(generator, PROMPT, 6, answer=answers.get, seed=3, max_new_tokens=5)

    ranked = best_of_n(generator, PROMPT, 6, seed=3, max_new_tokens=5, length_penalty=0.0)
    texts = [completion.text for _, completion in ranked]
    logprobs = [score for score, _ in ranked]
    assert len({*texts}) == 6
    # The majority wins, even with the least likely texts. A text without an answer has no vote.
    got = vote({texts[0]: "1", texts[4]: "2", texts[5]: "2"})
    assert got.winner == "2"
    assert list(got.counts.items()) == [("2", 2), ("1", 1)]
    assert [completion.text for completion in got.completions] == texts
    assert vote({})[:2] == (None, {})
    # A tie: the answer of the more likely texts wins.
    for one, two in (((0, 3), (1, 4)), ((0, 5), (1, 2)), ((2, 4), (3, 5))):
        tied = vote({texts[i]: "one" for i in one} | {texts[i]: "two" for i in two})
        sums = {"one": sum(logprobs[i] for i in one), "two": sum(logprobs[i] for i in two)}
        assert tied.counts == {"one": 2, "two": 2}
        assert tied.winner == max(sums, key=sums.get)


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return transformers.xLSTMForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# Every way to stop, and scores that favour short outputs, long outputs or neither.
BEAMS = [
    *product([2], [1.0], [False, True, "never"], [EOS]),
    *product([5], [0.0, 1.0, 2.5, -1.0], [False], [EOS]),
    (5, 2.5, True, EOS),
    (3, 0.5, False, [EOS, 9, 27]),
    (3, 1.0, "never", 9),
]


@pytest.mark.parametrize(("beams", "penalty", "early", "eos"), BEAMS)
def test_beam_search_is_that_of_transformers(generator, theirs, beams, penalty, early, eos):
    """Without a cache, because transformers cannot reorder that of this model."""
    options = {
        "num_beams": beams,
        "num_return_sequences": beams,
        "max_new_tokens": 9,
        "length_penalty": penalty,
        "early_stopping": early,
        "eos_token_id": eos,
    }
    want = theirs.generate(
        torch.tensor([[0, *PROMPT]]),
        use_cache=False,
        do_sample=False,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    ends = {eos} if isinstance(eos, int) else {*eos}
    texts = []
    for row in want.sequences[:, 1 + len(PROMPT) :].tolist():
        length = next((at for at, token in enumerate(row) if token in ends), len(row))
        texts.append((row[:length], "length" if length == 9 else "stop"))
    got = beam_search(generator, PROMPT, **options)
    assert [(c.token_ids, c.finish_reason) for _, c in got] == texts
    assert [score for score, _ in got] == [close(s) for s in want.sequences_scores.tolist()]


def test_the_beams_above_end_in_every_way(generator):
    def lengths(beams: int, penalty: float, early) -> list[int]:
        options = {"length_penalty": penalty, "early_stopping": early, "max_new_tokens": 9}
        options |= {"num_beams": beams, "num_return_sequences": beams}
        return [len(c.token_ids) for _, c in beam_search(generator, PROMPT, **options)]

    assert [lengths(2, 1.0, early) for early in (True, False, "never")] == [[4, 1], [4, 7], [4, 9]]
    assert lengths(5, 2.5, False) == [9, 9, 9, 9, 9]
    assert lengths(5, -1.0, False) == [1, 4, 5, 7, 7]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("ends", [(), (EOS,)])
def test_as_many_beams_as_texts_are_exhaustive(penalty, ends):
    model, everything = drawn(vocab_size=5), [*product(range(5), repeat=3)]
    with torch.no_grad():
        tokens = torch.tensor([[0, 4, 2, *ids] for ids in everything])
        logprobs = model(tokens)[0][:, 2:-1].double().log_softmax(-1)
    worth = {}
    for ids, steps in zip(everything, logprobs.gather(2, tokens[:, 3:, None]), strict=True):
        length = next((at for at, token in enumerate(ids, 1) if token in ends), 3)
        worth[ids[:length]] = float(steps[:length].sum()) / length**penalty
    assert len(worth) == (85 if ends else 125)
    ranked = beam_search(
        Generator(model, ByteTokenizer()),
        [4, 2],
        num_beams=125,
        num_return_sequences=125,
        max_new_tokens=3,
        length_penalty=penalty,
        eos_token_id=ends,
    )
    scores = {tuple(said(completion)): score for score, completion in ranked}
    assert scores == pytest.approx(worth, abs=2e-4)
    assert [*scores.values()] == sorted(scores.values(), reverse=True)
    assert len(ranked) == len(worth)


def test_beams_read_the_prompt_once_and_a_token_a_step(model, generator, reads):
    sampling = {"num_beams": 4, "max_new_tokens": 5, "eos_token_id": ()}
    [(score, completion)] = beam_search(generator, PROMPT, **sampling)
    assert reads[0] == [0, *PROMPT]
    assert list(map(len, reads[1:])) == [1] * 16
    assert score == close(logprob(model, PROMPT, completion.token_ids) / 5)
    assert sum(completion.logprobs) / 5 == close(score)
    assert completion.prompt_tokens == 6
    assert completion.tokens_per_second > 0
    start = generator.read([PROMPT[:2]])
    [(again, same)] = beam_search(generator, PROMPT[2:], state=start, **sampling)
    assert (same.token_ids, same.prompt_tokens) == (completion.token_ids, 3)
    assert again == close(score)


def test_one_beam_is_greedy(generator):
    for prompt in ([7], PROMPT):
        [(_, beam)] = beam_search(generator, prompt, num_beams=1, max_new_tokens=20)
        [greedy] = generator.generate([prompt], temperature=0, max_new_tokens=20)
        assert (beam.text, beam.token_ids) == (greedy.text, greedy.token_ids)
        assert beam.finish_reason == greedy.finish_reason


def test_children_are_what_reading_everything_again_gives(model, generator, reads):
    tree = Tree(generator, PROMPT)
    sampling = {"max_new_tokens": 4, "temperature": 1.2}
    children = tree.expand(tree.root, 4, seed=10, **sampling)
    grown = [child for child in children if not child.finished]
    assert 2 <= len(grown) <= len(children) == 4
    deeper = tree.expand(grown, 2, seed=10, **sampling)
    assert reads == [[0, *PROMPT]]
    assert tree.samples == 4 + 2 * len(grown)
    for index, child in enumerate(children + deeper):
        before = child.parent.token_ids
        [again] = generator.generate([PROMPT + before], seed=10 + index, **sampling)
        assert child.token_ids == before + again.token_ids
        assert child.text == ByteTokenizer().decode(child.token_ids)
        assert child.finished == (again.finish_reason == "stop")
        ids = before + said(again)
        assert child.logprob == close(logprob(model, PROMPT, ids))
        assert child.score == close(logprob(model, PROMPT, ids) / len(ids))
        assert child.depth == child.parent.depth + 1
        assert (child.state is None) == child.finished
        if child.state is not None:
            want, _ = model(torch.tensor([[0, *PROMPT, *child.token_ids]]), logits="last")
            assert torch.allclose(child.state.logits, want, atol=1e-4)


def test_prune_keeps_only_the_best_leaves_and_their_states(generator):
    tree = Tree(generator, PROMPT, length_penalty=0.0)
    children = tree.expand(tree.root, 5, seed=0, max_new_tokens=3, eos_token_id=())
    assert tree.root.state is not None
    again = tree.expand(tree.root, 1, seed=0, max_new_tokens=3, eos_token_id=())
    everyone = sorted(children + again, key=lambda node: -node.logprob)
    assert tree.leaves == everyone
    tree.prune(2)
    assert tree.leaves == everyone[:2]
    assert [node.state is None for node in everyone] == [False] * 2 + [True] * 4
    assert tree.root.state is None
    assert tree.best is everyone[0]
    for node in (tree.root, everyone[2]):
        with pytest.raises(
            ValueError, match=r"^a node that is finished or pruned cannot be expanded$"
        ):
            tree.expand([everyone[0], node], 2, max_new_tokens=1)


def test_equal_thoughts_become_one_child(generator):
    tree = Tree(generator, PROMPT)
    children = tree.expand(tree.root, 3, max_new_tokens=2, temperature=0, eos_token_id=())
    assert len(children) == 1
    assert (tree.samples, tree.tokens) == (3, 6)


def test_thoughts_end_with_a_stop_string_and_nodes_are_finished_when_done_returns_true(generator):
    tree = Tree(generator, PROMPT, done=lambda text: text.count("\n") == 2)
    bias = {"logit_bias": {NEWLINE: 2.5, EOS: -100.0}, "stop_strings": "\n", "max_new_tokens": 50}
    [line] = tree.expand(tree.root, 1, seed=0, **bias)
    assert line.text.endswith("\n")
    assert line.text.count("\n") == 1
    assert not line.finished
    two = tree.expand(line, 3, seed=0, **bias)
    assert all(node.finished and node.state is None for node in two)
    assert all(node.text.startswith(line.text) and node.text.count("\n") == 2 for node in two)
    assert len(two) > 1
    assert tree.best is max(two, key=lambda node: node.score)


def test_tree_search_equals_one_that_reads_everything_again(generator, reads):
    """Three levels, two leaves kept: the same leaves as from a plain search without states."""

    def worth(text: str) -> float:
        return sum(map(ord, text)) / max(1, len(text))

    sampling = {"max_new_tokens": 3, "temperature": 1.5}
    shape = {"width": 2, "depth": 3, "expand": 4}
    score = {"score": lambda prompt, node: worth(node.text)}
    tree = tree_search(generator, PROMPT, seed=7, **shape, **score, **sampling)
    assert reads == [[0, *PROMPT]]
    leaves, drawn_so_far = [([], "", False)], 0
    for _ in range(3):
        grown = [leaf for leaf in leaves if leaf[2]]
        for ids, _, finished in leaves:
            for _ in range(0 if finished else 4):
                [again] = generator.generate([PROMPT + ids], seed=7 + drawn_so_far, **sampling)
                drawn_so_far += 1
                longer = ids + again.token_ids
                text = ByteTokenizer().decode(longer)
                leaf = longer, text, again.finish_reason == "stop"
                grown += [leaf] if leaf not in grown else []
        leaves = sorted(grown, key=lambda leaf: -worth(leaf[1]))[:2]
    assert [(leaf.token_ids, leaf.text, leaf.finished) for leaf in tree.leaves] == leaves
    assert [leaf.score for leaf in tree.leaves] == [worth(leaf[1]) for leaf in leaves]
    assert tree.samples == drawn_so_far > 12
    assert tree.root.state is None


def test_tree_search_ends_when_all_leaves_are_finished(generator):
    sure = {"logit_bias": {EOS: 100}, "max_new_tokens": 5}
    tree = tree_search(generator, PROMPT, width=3, depth=10, expand=2, **sure)
    assert tree.samples == 2
    assert tree.best.finished
    assert tree.best.depth == 1


@pytest.mark.parametrize(
    ("search", "arguments", "message"),
    [
        (best_of_n, {"n": 0}, "n must be at least 1, not 0"),
        (
            best_of_n,
            {"n": 2, "length_penalty": float("nan")},
            "length_penalty must be a finite number, not nan",
        ),
        (best_of_n, {"n": 2, "top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        (best_of_n, {"n": 2, "stop_strings": ["a", ""]}, "a stop string must not be empty"),
        (best_of_n, {"n": 2, "beams": 3}, "there is no sampling parameter 'beams'; there are: max"),
        (best_of_n, {"n": 2, "prompt": None}, "there is nothing to continue: give a prompt or a"),
        (beam_search, {"num_beams": 0, "max_new_tokens": 1}, "num_beams must be at least 1, not 0"),
        (
            beam_search,
            {"num_beams": 1, "max_new_tokens": 0},
            "max_new_tokens must be at least 1, not 0",
        ),
        (
            beam_search,
            {"num_beams": 2, "max_new_tokens": 1, "num_return_sequences": 3},
            "num_return_sequences (3) must not exceed num_beams (2)",
        ),
        (
            beam_search,
            {"num_beams": 2, "max_new_tokens": 1, "early_stopping": "always"},
            "early_stopping must be True, False or 'never', not 'always'",
        ),
        (
            beam_search,
            {"num_beams": 2, "max_new_tokens": 1, "eos_token_id": 40},
            "eos_token_id 40 is outside the vocabulary of 40",
        ),
        (tree_search, {"width": 0, "depth": 1, "expand": 1}, "width must be at least 1, not 0"),
        (tree_search, {"width": 1, "depth": 0, "expand": 1}, "depth must be at least 1, not 0"),
        (tree_search, {"width": 1, "depth": 1, "expand": 0}, "expand must be at least 1, not 0"),
        (
            tree_search,
            {"width": 1, "depth": 1, "expand": 1, "temperature": -1},
            "temperature must be 0 or a positive number, not -1",
        ),
        (Tree, {"length_penalty": float("inf")}, "length_penalty must be a finite number, not inf"),
    ],
)
def test_mistakes_raise_before_anything_is_read(generator, reads, search, arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        search(generator, **{"prompt": PROMPT, **arguments})
    assert reads == []


def test_a_search_starts_from_one_state(generator):
    state = generator.read([PROMPT, PROMPT])
    with pytest.raises(ValueError, match=r"^a search starts from one state, not 2$"):
        best_of_n(generator, None, 2, state=state)
    tree = Tree(generator, PROMPT)
    for bad, message in (({"n": 0}, "n must be"), ({"n": 1, "top_k": -1}, "top_k must be")):
        with pytest.raises(ValueError, match=f"^{message}"):
            tree.expand(tree.root, **bad)
    with pytest.raises(ValueError, match=r"^keep must be at least 1, not 0$"):
        tree.prune(0)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 50.0}, {"presence_penalty": 9.0}, {"frequency_penalty": 5.0}]
)
def test_penalties_count_the_prompt_and_earlier_thoughts(generator, penalty):
    sampling = {"temperature": 0, "eos_token_id": (), **penalty}
    shape = {"width": 1, "depth": 6, "expand": 1, "max_new_tokens": 2}
    [whole] = generator.generate([PROMPT], max_new_tokens=12, **sampling)
    assert tree_search(generator, PROMPT, **shape, **sampling).best.token_ids == whole.token_ids
