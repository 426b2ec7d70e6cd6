"""`xlstm7b quantize`: write a checkpoint with 8-bit or 4-bit weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from xlstm7b.cli.options import (
    Device,
    Model,
    Overwrite,
    Target,
    TokenizerPath,
    check_new,
    count_progress,
    option,
)
from xlstm7b.devices import to_device
from xlstm7b.report import counted, table

if TYPE_CHECKING:
    from xlstm7b.config import ModelConfig
    from xlstm7b.tokenizer import Tokenizer

_BITS = {"8": "int8", "4": "int4", "fp8": "fp8"}
_SEQUENCES, _LENGTH = 128, 512  # of the calibration text


def quantize(
    source: Model,
    target: Target,
    bits: Annotated[str, option("Bits of the blocks' weights: 8, 4 or fp8.")],
    group_size: Annotated[
        int | None, option("Weights that share a scale, with 4 bits: 32, 64 or 128.", default="64")
    ] = None,
    head: Annotated[str, option("Bits of the head: 4, 8 or 16 (as stored).")] = "8",
    method: Annotated[
        str, option("Rounding: rtn to nearest, gptq to keep outputs on a text close.")
    ] = "rtn",
    calibration: Annotated[
        list[Path] | None,
        option(
            "Text file or folder of at least 512 tokens, for gptq and the reported errors; its "
            "first 65,536 tokens are read. Can be given several times.",
            default=False,
        ),
    ] = None,
    act_order: Annotated[
        bool, option("Round columns with large inputs first, with gptq.", "--act-order")
    ] = False,
    overwrite: Overwrite = False,
    tokenizer: TokenizerPath = None,
    device: Device = None,
) -> None:
    """Write a checkpoint with quantised weights, one tensor at a time.

    Gates, norms and the embedding stay as they are. The folder works with every command; train
    takes it only with a lora or state_tuning table in the recipe.

    After Ctrl-C, a kill or a full disk, the same command goes on where it stopped.
    """
    to = to_device(device)
    if bits not in _BITS:
        raise ValueError(f"--bits must be 8, 4 or fp8, not {bits!r}")
    _check_new(target, overwrite)
    if act_order and method != "gptq":
        raise ValueError("--act-order needs --method gptq")
    if method == "gptq" and not calibration:
        raise ValueError("--method gptq needs --calibration with a text")
    if group_size is not None and "4" not in (bits, head):
        raise ValueError("--group-size needs --bits 4 or --head 4: others have one scale per row")
    if tokenizer is not None and not calibration:
        raise ValueError("--tokenizer reads the text of --calibration, which is not given")
    from xlstm7b.checkpoint import open_checkpoint
    from xlstm7b.model.lm import schemes_of
    from xlstm7b.model.quantizer import quantize_checkpoint
    from xlstm7b.quantize.config import Quantization

    size = 64 if group_size is None else group_size
    quantization = Quantization.named(_BITS[bits], group_size=size, head=head)
    checkpoint = open_checkpoint(source)
    count = len(schemes_of(checkpoint.config, quantization))
    tokens = []
    if calibration:
        from xlstm7b.tokenizer import model_tokenizer

        text = model_tokenizer(checkpoint.folder, checkpoint.config, tokenizer)
        tokens = _calibration_tokens(calibration, text, checkpoint.config)
    with count_progress("quantising", count, shown=True) as advance:
        reports = quantize_checkpoint(
            checkpoint.folder,
            target,
            quantization,
            method=method,
            calibration=tokens,
            act_order=act_order,
            device=to,
            done=lambda report: advance(),
            overwrite=overwrite,
        )
    rows = [(report.name, str(report.scheme), f"{report.error:.2%}") for report in reports]
    print(table(("weights", "scheme", "output error"), rows))
    size = sum(path.stat().st_size for path in target.glob("model*.safetensors"))
    print(f"wrote {target}: {size / 1e9:.3g} GB, {checkpoint.nbytes / 1e9:.3g} GB before")


def _check_new(target: Path, overwrite: bool) -> None:
    """As `check_new`. Also names what a command left that was killed after its last rename."""
    try:
        check_new(target, overwrite)
    except ValueError as error:
        from xlstm7b.files import lock_folder
        from xlstm7b.model.quantizer import work_folder

        left = work_folder(target.resolve())
        if not left.is_dir() or not (target / "config.json").exists():
            raise
        with lock_folder(left, "quantising to", name=target):
            raise ValueError(
                f"{error}; a killed command left {left}: remove it, or continue with --overwrite"
            ) from error


def _calibration_tokens(
    paths: list[Path], tokenizer: "Tokenizer", config: "ModelConfig"
) -> list[list[int]]:
    """The beginning of the text in sequences of one length, each with the model's first token."""
    from xlstm7b.evaluate.perplexity import read_documents

    first = [config.bos_token_id] if config.force_bos_token_insert else []
    ids: list[int] = []
    for document in read_documents(paths):
        ids += tokenizer.encode(document)
        if len(ids) >= _SEQUENCES * _LENGTH:
            break
    length = _LENGTH - len(first)
    if len(ids) < length:
        raise ValueError(
            f"the calibration text has only {counted(len(ids), 'token')}: give a text of at least "
            f"{_LENGTH} tokens, better {_SEQUENCES * _LENGTH:,}"
        )
    starts = range(0, len(ids) - length + 1, length)
    return [first + ids[start : start + length] for start in starts][:_SEQUENCES]
