"""The command line: `ringreduce run`, `train`, `search`, `compare`, `bench` and others."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import ringreduce
from ringreduce.config import trace_file
from ringreduce.console.terminal import print_error, replace_unencodable
from ringreduce.errors import counted, did_you_mean
from ringreduce.launch import elastic_options
from ringreduce.supervisor.launcher import Hosts, Job
from ringreduce.supervisor.mpiexec import LaunchError, NoMpiError
from ringreduce.supervisor.supervisor import run
from ringreduce.system.cores import shared_cores
from ringreduce.trace.recorder import TRACE

if TYPE_CHECKING:
    from ringreduce.launch.example_call import ExplainRequest, PipelineRequest
    from ringreduce.schedules.cost import Link

_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_RANKS = ("-n", "-np", "--ranks")
_SILENT_S = 2.0
"""Seconds after which `explain` prints what it computes."""
_NAMED_NODES = 8
"""The most nodes whose ranks that line has."""
_BIT_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECOND_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_OF_COLLECTIVES = frozenset(
    [
        *("nodes", "link", "collective", "algorithm", "root", "nbytes", "dtype", "transport"),
        *("json", "trace"),
    ]
)
"""Options of `explain` for collectives alone, by the names under which they are stored."""
_OF_PIPELINES = frozenset(["stages", "splits", "virtual"])
"""Options of `explain` for pipelines alone, alike."""
PROGRAMS: Mapping[str, str] = {
    "train": "ringreduce.train",
    "search": "ringreduce.train.search",
    "compare": "ringreduce.train.compare",
    "bench": "ringreduce.bench",
}
"""Command that starts a program of ours -> its module."""
_ALGORITHM_HELP = "default: auto, the first that is predicted within 2 %% of the cheapest"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments).  Returns the exit code.

    If the command line is wrong, prints the reason and raises SystemExit with code 2.
    """
    replace_unencodable()
    parser, commands = parsers()
    if "_ARGCOMPLETE" in os.environ:  # the script of `ringreduce completion` asks
        from ringreduce.launch.completion import complete

        complete(parser, commands, options_module)
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["train"] and _asks_for_table(words):
        from ringreduce.train.strategies import table

        print(table())  # No rank is started, so -n may be missing.
        raise SystemExit(0)
    options, rest = parser.parse_known_args(words)
    command = commands[options.command]
    if rest and options_module(options.command) is None:
        meant = did_you_mean(rest[0], command._option_string_actions)
        command.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    try:
        shared_cores(os.environ)
    except ValueError as error:
        command.error(str(error))
    if options.command == "doctor":
        from ringreduce.launch import doctor

        return doctor.clean() if options.clean else doctor.main()
    if options.command == "explain":
        return _explain(command, options)
    if options.command == "scale":
        from ringreduce.console.sections import wrapped
        from ringreduce.supervisor import commands as running

        if options.job is not None:
            if options.size is None:
                command.error("how many ranks? JOB and N; without both it lists your jobs")
            return running.scale(options.job, options.size)
        jobs = running.jobs() or ["you have no job that was started with --elastic"]
        print(*map(wrapped, jobs), sep="\n")
        return 0
    if options.command == "completion":
        from ringreduce.launch.completion import script

        print(script(options.shell), end="")
        return 0
    try:
        job, rules = _job(options, rest), elastic_options.rules_of(command, options)
        if job.trace is not None:
            from ringreduce.trace import traces

            traces.prepare(job.trace)
        if rules is not None and job.without_mpi:
            raise ValueError("--elastic needs an MPI; leave --without-mpi out")
    except (ValueError, OSError, ImportError) as error:
        command.error(str(error))
    try:
        if rules is not None:
            return elastic_options.supervise(command, options, job, rules)
        return run(job)
    except LaunchError as error:
        needs = "--elastic needs an MPI: " * (rules is not None and isinstance(error, NoMpiError))
        print(f"ringreduce {options.command}: {needs}{error}", file=sys.stderr)
        return 1
    finally:
        if job.trace is not None:
            traces.write(job.trace)


def _asks_for_table(words: Sequence[str]) -> bool:
    return "--strategy=help" in words or ("--strategy", "help") in pairwise(words)


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    is_pipeline = options.pipeline is not None
    others = _OF_COLLECTIVES if is_pipeline else _OF_PIPELINES
    if flag := elastic_options.given_option(parser, options, others):
        hint = "a collective, not for --pipeline" if is_pipeline else "a pipeline; add --pipeline"
        parser.error(f"{flag} is for {hint}")
    nodes = ",".join(map(str, options.nodes[:_NAMED_NODES])) if options.nodes else ""
    nodes += ",…" * (len(options.nodes) > _NAMED_NODES)
    ranks = "nodes of " * bool(nodes) + counted(nodes or options.stages or options.ranks, "rank")
    does, of = "computing" + " and proving" * options.prove, options.pipeline or options.collective
    text = f"{does} schedule and times of {of} on {ranks}; Ctrl-C ends it"
    timer = threading.Timer(_SILENT_S, print_error, [f"ringreduce explain: {text}"])
    timer.daemon = True
    timer.start()
    try:
        from ringreduce.launch import explain

        try:
            request = _pipeline_request(options) if is_pipeline else _request(options)
        except ValueError as error:
            parser.error(str(error))
        return explain.main(request)
    except KeyboardInterrupt:
        print_error("ringreduce explain: interrupted")
        return 128 + signal.SIGINT
    finally:
        timer.cancel()


def _request(options: argparse.Namespace) -> ExplainRequest:
    from ringreduce.launch.example_call import ExplainRequest

    if options.ranks is None and not options.nodes:
        raise ValueError("how many ranks? --ranks 8, or --nodes 3,1,4")
    ranks = sum(options.nodes) if options.ranks is None else options.ranks
    return ExplainRequest(**elastic_options.fields_of(ExplainRequest, options) | {"ranks": ranks})


def _pipeline_request(options: argparse.Namespace) -> PipelineRequest:
    from ringreduce.launch.example_call import PipelineRequest

    ranks = options.ranks if options.stages is None else options.stages
    if ranks is None:
        raise ValueError("how many ranks has the pipeline? --stages 4")
    if options.ranks not in (None, ranks):
        raise ValueError(f"--stages is {ranks}, and -n is {options.ranks}; give one of them")
    splits = ranks if options.splits is None else options.splits
    given = elastic_options.fields_of(PipelineRequest, options)
    return PipelineRequest(options.pipeline, **given | {"ranks": ranks, "splits": splits})


def options_module(command: str) -> ModuleType | None:
    """Return the module with the options of the program of ours that `command` starts, if any.

    The module has the functions `parser` and `read`.
    """
    if command == "train":
        from ringreduce.train import configuration

        return configuration
    if command == "search":
        from ringreduce.train.search import options as search_options

        return search_options
    if command == "compare":
        from ringreduce.train.compare import options as compare_options

        return compare_options
    if command == "bench":
        from ringreduce.bench import options

        return options
    return None


def _job(options: argparse.Namespace, rest: Sequence[str]) -> Job:
    module = options_module(options.command)
    if module is not None:
        from ringreduce.recovery.checkpoint import interrupted_text

        # Here a wrong option is reported once, and not by every rank.
        given = module.read(rest, f"ringreduce {options.command}")
        program = ("-P", "-m", PROGRAMS[options.command], *rest)
        if options.command == "search":
            program += ("--job", shlex.join(_job_words(options)))
        if options.command == "compare":
            program += ("--ranks", str(options.ranks))
    else:
        program = _program(options)
    job = Job(
        ranks=options.ranks,
        program=program,
        hosts=options.hosts,
        nodes=options.nodes,
        timeout_s=options.timeout_s,
        tag_output=options.tag_output,
        without_mpi=options.without_mpi,
        trace=trace_file(options.trace) if getattr(options, "trace", None) else None,
        instead_of_gloo=options.command == "run" and options.instead_of_gloo,
        threads=_threads(options, given) if module is not None else None,
        interrupted=(
            partial(interrupted_text, given.outputs().checkpoint_dir)
            if options.command == "train"
            else None
        ),
    )
    if module is not None and options.command in ("train", "search", "compare"):
        nodes = _ranks_of_nodes(job)
        more = module.check_ranks(given, nodes) or 0
        if options.command == "train" and options.elastic is not None:
            module.check_elastic_run(given, nodes, options.elastic[1] or job.ranks)
        if more:  # servers, beside the ranks of the last node
            sizes = (*job.nodes[:-1], job.nodes[-1] + more) if job.nodes else ()
            job = replace(job, ranks=job.ranks + more, nodes=sizes)
    return job


def _threads(options: argparse.Namespace, given: Any) -> int | None:
    """Return the number of threads of each rank; None: it depends on the number of ranks.

    With --batch-shards each rank has one: the bits of a product could depend on the number.
    """
    return 1 if options.command == "train" and given.settings().batch_shards else None


def _ranks_of_nodes(job: Job) -> list[range]:
    # Hosts are filled in their order.
    ends = [min(end, job.ranks) for end in accumulate(ranks for _, ranks in job.hosts)]
    if job.nodes:
        ends = [*accumulate(job.nodes)]
    starts_and_ends = pairwise([0, *(ends or [job.ranks])])
    return [range(start, end) for start, end in starts_and_ends if start < end]


def _job_words(options: argparse.Namespace) -> list[str]:
    """Return the options that start the same job, as words of a command line."""
    words = ["-n", str(options.ranks)]
    if options.hosts:
        words += ["--hosts", ",".join(f"{host}:{ranks}" for host, ranks in options.hosts)]
    if options.nodes:
        words += ["--nodes", ",".join(map(str, options.nodes))]
    if options.timeout_s is not None:
        words += ["--timeout-s", f"{options.timeout_s:g}"]
    words += ["--without-mpi"] * options.without_mpi
    return words + ["--tag-output"] * options.tag_output


def _program(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the program of ``ringreduce run``, and its arguments.

    ``python`` may stand before the program, as for mpiexec.  The ranks run the interpreter of
    this process.
    """
    module, words = options.module, list(options.program)
    if words[:1] == ["--"]:
        del words[0]
    if not words:
        raise ValueError("the following arguments are required: program")
    started = words[0]
    is_script = "/" not in words[0] and Path(words[0]).is_file()
    if not module and words[1:] and _PYTHON.fullmatch(words[0]) and not is_script:
        module = words[1] == "-m"
        words = words[1 + module :]
        if not words or words[0].startswith("-"):
            raise ValueError(f"wanted a script, or -m and a module, after {started}")
    if not options.hosts:  # other hosts have their own files
        _check_is_there(words[0], module)
    return ("-m", *words) if module else tuple(words)


def _check_is_there(program: str, module: bool) -> None:
    """Raise ValueError if there is no such program here: each rank would say so."""
    path = Path(program)
    if module:
        package = program.partition(".")[0]
        # The ranks look in this folder too, as `python -m` does.
        if find_spec(package) is None and PathFinder.find_spec(package, [""]) is None:
            raise ValueError(f"no module {program} in this folder and in the environment")
    elif not path.exists():
        hint = "" if path.suffix else f"; a module is started by -m {program}"
        raise ValueError(f"no file {program}{hint}")
    elif path.is_dir() and not (path / "__main__.py").exists():
        raise ValueError(f"{program} is a folder without a __main__.py; name a script in it")


class _CommandParser(argparse.ArgumentParser):
    """A parser whose error for an unknown command names the command that is closest."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = [str(choice) for choice in action.choices or ()]
        if known and value not in known:
            meant = did_you_mean(str(value), known)
            text = f"unknown command {value!r}; choose one of {', '.join(known)}{meant}"
            raise argparse.ArgumentError(None, text)


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    parser = _CommandParser(prog="ringreduce", allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"ringreduce {ringreduce.__version__}"
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    start = commands.add_parser(
        "run",
        help="run a script or module on n ranks",
        usage="ringreduce run -n N [options] (script.py | -m module) args...",
        description="Run a script or module on N ranks, with the mpiexec of this environment.",
    )
    _add_job_options(start)
    elastic_options.add_options(start, "run")
    start.add_argument(
        "--instead-of-gloo",
        action="store_true",
        help="give a program of torch that asks for Gloo the backend of ringreduce",
    )
    start.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    # One argument: of two, argparse would take away a "--" after the first.
    program = start.add_argument(
        "program", nargs=argparse.REMAINDER, help="script or module, and its arguments"
    )
    program.required = False  # `_program` says that it is missing
    trainers = {}
    for name, options, does, description in (
        (
            "train",
            "[options] [trainer options]",
            "run the trainer on n ranks",
            "The same as: ringreduce run -n N [options] -m ringreduce.train ...",
        ),
        (
            "search",
            "--for (split_size|batch|mesh) [options] [trainer options]",
            "find the fastest split size, batch or mesh to train with",
            "Price candidates, measure the best of them in turns, and print the command to train "
            "with.",
        ),
        (
            "compare",
            "[options] [compare options] [trainer options]",
            "train with several strategies in turns, and print their figures",
            "N ranks compute; servers are further ranks beside them.",
        ),
    ):
        usage = f"ringreduce {name} -n N {options}"
        trainers[name] = each = commands.add_parser(
            name, help=does, usage=usage, description=description, add_help=False
        )
        each.add_argument("-h", "--help", action=_FullHelp, help="show all options and exit")
        _add_job_options(each)
    train = trainers["train"]
    elastic_options.add_options(train, "train")
    bench = commands.add_parser(
        "bench",
        help="time collectives on n ranks, beside MPI's own and Gloo's",
        usage="ringreduce bench -n N [options] [bench options]",
        description="The same as: ringreduce run -n N [options] -m ringreduce.bench ...",
        epilog="Its own options, those of nccl-tests (-b -e -f -w -o -d -c) among them: "
        "python -m ringreduce.bench --help",
    )
    _add_job_options(bench)
    for each in (start, train, bench):
        help = "write what all ranks do over time: .json for Chrome and Perfetto, .svg, .png"
        variable = os.environ.get(TRACE)
        each.add_argument("--trace", default=variable, metavar="FILE", help=help)
    _add_scale(commands)
    _add_explain(commands)
    _add_doctor(commands)
    _add_completion(commands)
    for command in commands.choices.values():
        command.allow_abbrev = False
    return parser, commands.choices


class _FullHelp(argparse.Action):
    """Prints the options of the launcher and of the program, whose module it imports for that."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        command = parser.prog.rpartition(" ")[2]
        module = options_module(command)
        assert module is not None
        of_program = "trainer" if command == "train" else command
        _, _, explained = module.parser("").format_help().partition("options:\n")
        print(f"{parser.format_help()}\n{of_program} options:\n{explained}", end="")
        parser.exit()


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(*_RANKS, dest="ranks", type=int, required=True, metavar="N", help="ranks")
    add("--hosts", type=_hosts, default=(), metavar="H1:2,H2:2", help="hosts and their ranks")
    add("--nodes", type=_nodes, default=(), metavar="3,1,2", help="ranks of each node, as stated")
    add(
        "--timeout-s",
        type=float,
        metavar="S",
        help="seconds without progress after which a collective fails",
    )
    add("--without-mpi", action="store_true", help="start the ranks of this host without MPI")
    add("--tag-output", action="store_true", help="begin each line with the rank it comes from")


def _add_scale(commands: _Commands) -> None:
    parser = commands.add_parser(
        "scale",
        help="have a running job go on with another number of ranks",
        usage="ringreduce scale [JOB N]",
        description="Have a job that was started with --elastic go on with N ranks, and wait until "
        "it does.  No step is lost.  Without JOB and N, list your jobs.",
    )
    add = parser.add_argument
    add("job", type=int, nargs="?", metavar="JOB", help="process id of the launcher")
    add("size", type=int, nargs="?", metavar="N", help="ranks, as --elastic allows")


def _add_explain(commands: _Commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="show, price and prove an algorithm or a pipeline without running it",
        usage="ringreduce explain (--ranks N | --nodes 3,1,4 | --pipeline NAME --stages N) ...",
        description="Who sends what when, how much, and how long every candidate takes.",
    )
    add = parser.add_argument
    add(*_RANKS, dest="ranks", type=int, metavar="N", help="ranks; default: those of --nodes")
    add("--nodes", type=_nodes, default=(), metavar="3,1,4", help="ranks of each node, or 16x8")
    add(
        "--link",
        type=_link,
        metavar="10gbit,10us",
        help="rate and latency of the network between nodes; default: these",
    )
    add("--collective", default="all_reduce", metavar="NAME", help="default: all_reduce")
    add("--algorithm", default="auto", metavar="NAME", help=_ALGORITHM_HELP)
    add("--root", type=int, default=0, metavar="RANK", help="of a rooted collective; default: 0")
    add(
        "--bytes",
        dest="nbytes",
        type=_bytes,
        default=1 << 20,
        metavar="64M",
        help="of the whole array; K, M and G are powers of 1024; default: 1M",
    )
    add("--dtype", default="float32", metavar="NAME", help="default: float32")
    add(
        "--transport",
        metavar="shm|mpi",
        help="shared memory or messages; default: what a job on this host takes",
    )
    add("--json", action="store_true", help="print the choice of auto as JSON, and nothing else")
    add("--pipeline", metavar="NAME", help="a schedule of a pipeline, in place of a collective")
    add("--stages", type=int, metavar="N", help="ranks of a pipeline; the same as -n")
    add("--splits", type=int, metavar="N", help="microbatches; default: as many as ranks")
    add(
        "--virtual",
        type=int,
        default=1,
        metavar="N",
        help="stages of each rank, for --pipeline interleaved; default: 1",
    )
    add("--svg", type=Path, metavar="FILE", help="write a picture of it")
    add("--png", type=Path, metavar="FILE", help="the same; needs pip install 'ringreduce[plot]'")
    add("--trace", type=Path, metavar="FILE.json", help="write the predicted messages as a trace")
    add("--check", dest="prove", action="store_true", help="prove it here and now")


def _add_doctor(commands: _Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="print the facts for a bug report, and what to repair",
        description="Check this environment: each line is ok, or says what to repair.",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove the files of killed MPI jobs that no process uses, and check nothing",
    )


def _add_completion(commands: _Commands) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes the command line in a shell",
        usage="ringreduce completion (bash | zsh | fish)",
        description="Print a script that completes commands, options and their values in a shell.",
        epilog="For the present bash: source <(ringreduce completion bash)",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; wanted one such as 4096, 8K or 64M")
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


def _hosts(text: str) -> Hosts:
    return tuple(_host(entry) for entry in text.split(","))


def _host(text: str) -> tuple[str, int]:
    name, colon, count = text.partition(":")
    if not name or (colon and not (count.isdecimal() and int(count) > 0)):
        raise argparse.ArgumentTypeError(f"{text!r} is no host; wanted name or name:ranks")
    return name, int(count) if colon else 1


def _nodes(text: str) -> tuple[int, ...]:
    """Return the ranks of each node; ``16x8`` is 16 nodes of 8 ranks."""
    sizes: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(?:([1-9][0-9]*)x)?([1-9][0-9]*)", entry)
        if not match:
            raise argparse.ArgumentTypeError(
                f"{text!r}; wanted the ranks of each node, as in 3,1,2, or 16x8 for 16 nodes of 8"
            )
        sizes += [int(match[2])] * int(match[1] or 1)
    return tuple(sizes)


def _link(text: str) -> Link:
    from ringreduce.schedules.cost import Link, Profile

    bits, seconds = "|".join(_BIT_UNITS), "|".join(_SECOND_UNITS)
    number = r"([0-9]+(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"{number}({bits}),{number}({seconds})", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no link; wanted its rate and its latency, as in 10gbit,10us"
        )
    return Link(
        alpha_s=float(match[3]) * _SECOND_UNITS[match[4]],
        beta_s_per_byte=8 / (float(match[1]) * _BIT_UNITS[match[2]]),
        message_s=Profile().between_nodes.message_s,
    )


if __name__ == "__main__":
    sys.exit(main())
