"""The command ``jackfield parity``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from jackfield.cli.commands import deadline_option, json_option, show
from jackfield.errors import ConfigError

_COLUMNS = ("subject", "measure", "error", "tolerance", "verdict", "where")


@click.command()
@click.argument("engines", metavar="[ENGINE]…", nargs=-1)
@click.option("--rollout", "servers", metavar="SERVER", multiple=True, help="Also a rollout server; may be repeated.")
@click.option("--model", default="tiny", show_default=True, help="A Hugging Face folder, or tiny or tiny-moe.")
@click.option("--batch", type=click.Path(dir_okay=False, path_type=Path), help="A batch that a framework has written.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the batch, with the reference.")
@click.option("--loss", metavar="KEY=VALUE", multiple=True, help="Change a setting of the batch's loss.")
@click.option("--trl", metavar="PYTHON", help="Interpreter that has TRL; default: this one, if it has it.")
@click.option("--no-trl", is_flag=True, help="Leave TRL out.")
@click.option("--tolerance", metavar="MEASURE=VALUE", multiple=True, help="Change the tolerance of a measure.")
@click.option("--by-name", is_flag=True, help="Show the errors of each gradient and parameter.")
@deadline_option(600.0, "Seconds for the processes of one engine or server.")
@json_option
def parity(
    engines: tuple[str, ...],
    servers: tuple[str, ...],
    model: str,
    batch: Path | None,
    write: Path | None,
    loss: tuple[str, ...],
    trl: str | None,
    no_trl: bool,
    tolerance: tuple[str, ...],
    by_name: bool,
    deadline: float,
    as_json: bool,
) -> None:
    """Compare training engines and rollout servers with a float64 reference on one batch and one set of weights.

    ENGINE and SERVER are names of plugins with optional settings and ranks: fsdp, fsdp:wrap=layers@2,
    fsdp:model.lora.rank=4,cluster.offload=true. The guide docs/guides/parity.md lists the keys. The table has, for each
    engine, the largest error of log-probs, loss, gradients and parameters after three steps. The exit code is 1 if one
    is beyond its tolerance, or an engine or server failed.
    """
    if not (engines or servers or write or batch):
        raise click.UsageError("name an engine, or give --rollout, --batch or --write")
    if batch is not None and loss:
        raise ConfigError("the batch's file says which loss is computed", where="--loss", fix="leave out --loss")
    if write is not None and not write.absolute().parent.is_dir():
        fix = "make the folder, or give another file"
        raise ConfigError("the file cannot be written", where="--write", expected="a folder", found=write, fix=fix)
    from jackfield_parity.oracle import Oracle, Request

    request = Request(
        engines=engines,
        servers=servers,
        model=model,
        batch=batch,
        loss=loss,
        trl=trl,
        with_trl=not no_trl,
        tolerances=tolerance,
        seconds=deadline,
    )
    with tempfile.TemporaryDirectory(prefix="jackfield-parity-") as folder:
        oracle = Oracle(request, Path(folder), lambda text: click.echo(text, err=True))
        report = oracle.run(write)
    if as_json:
        show(report.as_dict())
    else:
        show(report.table(by_name=by_name), *_COLUMNS)
        click.echo(report.summary())
    compared = report.lines or write or report.errors
    if not compared:
        click.echo("nothing was compared: name an engine, or give results in the batch's file", err=True)
    sys.exit(0 if report.ok and compared else 1)
