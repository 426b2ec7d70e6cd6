"""`xlstm7b download | push`: the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from xlstm7b.cli.options import option
from xlstm7b.report import shown_bytes, table


def download(
    name: Annotated[
        str,
        typer.Argument(
            help="Hub id: user/repo, user/repo@revision, either with /subfolder. A revision is a "
            "branch, a tag or a commit."
        ),
    ],
) -> None:
    """Download a model, adapter or saved state from the Hugging Face hub; print its local folder.

    Only files that loading needs are fetched, into the hub's cache. Loading NAME works without a
    connection from then on. The same command continues an interrupted download.
    """
    from xlstm7b import hub

    parsed = hub.parse(name)
    if parsed is None:
        raise ValueError(f"{name!r} is not user/repo, user/repo@revision or either with /subfolder")
    print(hub.download(parsed, (*hub.MODEL_FILES, *hub.ADAPTER_FILES, hub.STATE_FILE)))


def push(
    folder: Annotated[
        Path, typer.Argument(help="Checkpoint folder, adapter folder, or file of a saved state.")
    ],
    repo: Annotated[
        str, typer.Argument(help="Hub id: user/repo, user/repo@branch, either with /subfolder.")
    ],
    license_id: Annotated[
        str | None,
        option(
            "Licence of the weights: an identifier of the hub, such as apache-2.0, or "
            "nxai-community-license for the released weights and what was made of them.",
            "--license",
            default="that in the README.md of FOLDER",
        ),
    ] = None,
    private: Annotated[bool, option("Make a new repository private.", "--private")] = False,
    revision: Annotated[
        str | None, option("Branch to commit to. It is made if needed.", default="main")
    ] = None,
    subfolder: Annotated[
        str | None, option("Folder of the repository to write to.", default="the root")
    ] = None,
    results: Annotated[
        list[Path] | None,
        option(
            "Results file of xlstm7b eval, for the model card. Can be given several times.",
            default="none",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        option(
            "Folder of the training run, for recipe and data in the model card.", default="none"
        ),
    ] = None,
    dry_run: Annotated[
        bool, option("Print the files and the model card, and send nothing.", "--dry-run")
    ] = False,
) -> None:
    """Upload a checkpoint, an adapter or a saved state to the Hugging Face hub.

    The files are verified first. A folder with files that do not belong to it is refused. A model
    card is written if FOLDER has no README.md.
    """
    from xlstm7b.evaluate.results import read_metrics
    from xlstm7b.model.publish import prepare

    upload = prepare(
        folder,
        repo,
        license=license_id,
        private=private,
        revision=revision,
        subfolder=subfolder,
        results={key: value for file in results or () for key, value in read_metrics(file).items()},
        run=run,
    )
    if not dry_run:
        print(upload.send())
        return
    sizes = upload.sizes()
    rows = [(name, shown_bytes(size)) for name, size in sizes.items()]
    print(f"nothing was sent; without --dry-run, {upload.name} gets these files:\n")
    print(table(("file", "size"), [*rows, ("total", shown_bytes(sum(sizes.values())))]))
    print(f"\n{upload.card}", end="")
