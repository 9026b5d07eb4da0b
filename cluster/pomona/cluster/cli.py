"""The command line: `pomona serve | plan | status`. Errors a person can mend are one sentence and exit code 2."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console

from pomona.workers.errors import OperatorError, PomonaError

from . import tables
from .config import ServeConfig, load

OPERATOR_ERROR = 2
FAILED = 1

app = typer.Typer(
    name="pomona",
    help="Serve MLX language models from several Macs as one OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_CAPACITY, _MODEL, _NETWORK = "Capacity", "Model", "Network"

Model = Annotated[str, typer.Argument(metavar="MODEL|CONFIG.yaml", help="A folder, a .gguf file, org/name, or a file.")]
ServedName = Annotated[
    str | None, typer.Option(rich_help_panel=_MODEL, help="The name clients use \\[default: MODEL's last part].")
]
Tp = Annotated[
    int | None, typer.Option("--tp-size", "--tensor-parallel-size", "--tp", help="Ranks that share each layer.")
]
Dp = Annotated[
    int | None,
    typer.Option("--dp-size", "--data-parallel-size", "--dp", help="Replicas; with DP attention: owners."),
]
Pp = Annotated[int | None, typer.Option("--pp-size", "--pipeline-parallel-size", help="Pipeline stages.")]
DpAttention = Annotated[bool | None, typer.Option("--enable-dp-attention", help="Split attention by request.")]
MaxRunning = Annotated[
    int | None, typer.Option(rich_help_panel=_CAPACITY, help="Requests that run at once in ONE replica.")
]
MaxMamba = Annotated[
    int | None, typer.Option(rich_help_panel=_CAPACITY, help="Auxiliary-state slots of ONE replica (hybrid models).")
]
MaxTokens = Annotated[int | None, typer.Option(rich_help_panel=_CAPACITY, help="KV tokens an owner holds at most.")]
MaxQueued = Annotated[int | None, typer.Option(rich_help_panel=_CAPACITY, help="Requests that wait at one owner.")]
MemFraction = Annotated[
    float | None, typer.Option(rich_help_panel=_CAPACITY, help="Of the device's working set, what pomona uses.")
]
MambaRatio = Annotated[
    float | None, typer.Option(rich_help_panel=_CAPACITY, help="Auxiliary state : KV memory of a hybrid model.")
]
NoRadix = Annotated[
    bool | None,
    typer.Option("--disable-radix-cache", rich_help_panel=_CAPACITY, help="One auxiliary slot a request, not four."),
]
ContextLength = Annotated[int | None, typer.Option(rich_help_panel=_MODEL, help="Tokens of prompt and answer.")]
Chunk = Annotated[int | None, typer.Option(rich_help_panel=_CAPACITY, help="Prompt tokens computed in one step.")]
MaxStep = Annotated[
    float | None,
    typer.Option(rich_help_panel=_CAPACITY, help="Seconds of a step while answers stream \\[default: 0.25]."),
]
KvBits = Annotated[
    int | None,
    typer.Option(rich_help_panel=_CAPACITY, help="Quantise cached keys and values to 4 or 8 bits \\[default: off]."),
]
Dtype = Annotated[str | None, typer.Option(rich_help_panel=_MODEL, help="auto, float32, bfloat16 or float16.")]
Trust = Annotated[
    bool | None, typer.Option("--trust-remote-code", rich_help_panel=_MODEL, help="Run code that the model brings.")
]
Host = Annotated[str | None, typer.Option(rich_help_panel=_NETWORK, help="Where the gateway listens.")]
Port = Annotated[int | None, typer.Option(rich_help_panel=_NETWORK, help="The gateway's port \\[default: 8000].")]
MetricsHost = Annotated[str | None, typer.Option(rich_help_panel=_NETWORK, help="Where the head's exporter listens.")]
MetricsPort = Annotated[
    int | None, typer.Option(rich_help_panel=_NETWORK, help="The exporter's port \\[default: 9400].")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="POMONA_API_KEY", rich_help_panel=_NETWORK, help="Clients must send it.")
]
Address = Annotated[
    str | None,
    typer.Option(rich_help_panel=_NETWORK, help="An existing Ray cluster, host:port \\[default: start one]."),
]
LoadTimeout = Annotated[float | None, typer.Option("--load-timeout-s", help="Give up when loading takes longer.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"pomona {version('pomona')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    del show_version


@app.command()
def serve(
    model: Model,
    served_model_name: ServedName = None,
    tp_size: Tp = None,
    dp_size: Dp = None,
    pp_size: Pp = None,
    enable_dp_attention: DpAttention = None,
    max_running_requests: MaxRunning = None,
    max_mamba_cache_size: MaxMamba = None,
    max_total_tokens: MaxTokens = None,
    max_queued_requests: MaxQueued = None,
    mem_fraction_static: MemFraction = None,
    mamba_full_memory_ratio: MambaRatio = None,
    disable_radix_cache: NoRadix = None,
    context_length: ContextLength = None,
    chunked_prefill_size: Chunk = None,
    max_step_s: MaxStep = None,
    kv_bits: KvBits = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = None,
    host: Host = None,
    port: Port = None,
    metrics_host: MetricsHost = None,
    metrics_port: MetricsPort = None,
    api_key: ApiKey = None,
    address: Address = None,
    load_timeout_s: LoadTimeout = None,
) -> None:
    """Serve MODEL here, or on the Ray cluster that --address names, until Ctrl-C."""
    from .serving import run

    raise typer.Exit(run(_config(locals()), Console(), Console(stderr=True)))


@app.command()
def plan(
    model: Model,
    served_model_name: ServedName = None,
    tp_size: Tp = None,
    dp_size: Dp = None,
    pp_size: Pp = None,
    enable_dp_attention: DpAttention = None,
    max_running_requests: MaxRunning = None,
    max_mamba_cache_size: MaxMamba = None,
    max_total_tokens: MaxTokens = None,
    mem_fraction_static: MemFraction = None,
    mamba_full_memory_ratio: MambaRatio = None,
    disable_radix_cache: NoRadix = None,
    context_length: ContextLength = None,
    kv_bits: KvBits = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Show topology, shares, memory and what binds, without loading weights."""
    from .foresight import look

    config = _config({k: v for k, v in locals().items() if k not in ("as_json", "look")})
    foresight = look(config)
    if foresight.plan is None:
        raise OperatorError(
            f"{config.model} is not on this machine, so its sizes are unknown: "
            f"download it first, or name a local folder"
        )
    shown = foresight.plan.to_json()
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
    else:
        Console().print(tables.plan_view(shown))


@app.command()
def status(
    url: Annotated[str, typer.Option(help="The gateway.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show the running cluster: shares, live pools, addresses."""
    from .client import fetch_cluster

    shown = fetch_cluster(url, api_key)
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    console = Console()
    console.print(tables.plan_view(shown))
    console.print(tables.addresses(shown["addresses"]))


def _config(arguments: dict[str, Any]) -> ServeConfig:
    flags = {name: value for name, value in arguments.items() if name in ServeConfig.model_fields and name != "model"}
    return load(arguments["model"], flags)


def main() -> None:
    """Entry point."""
    try:
        app()
    except PomonaError as exc:
        print(f"pomona: {exc}", file=sys.stderr)
        sys.exit(OPERATOR_ERROR if isinstance(exc, OperatorError) else FAILED)
