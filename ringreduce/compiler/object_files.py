"""Machine code as a file: made by Numba, loaded without it.

Numba takes longer to import than MPI to start.  So what it compiles is kept as an object file,
which LLVM alone puts in memory, behind a digest of itself: a damaged one would end the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIGEST_BYTES = hashlib.sha256().digest_size
_ENGINES: list[Any] = []
"""What machine code lives in, for as long as the process."""


@dataclass(frozen=True)
class MachineCode:
    """A C function, compiled.

    `needs` are the functions and variables of other libraries, Python's among them, that it uses.
    """

    name: str
    needs: tuple[str, ...]
    code: bytes


def compiled(function: Callable[..., Any], signature: Any, options: dict[str, Any]) -> MachineCode:
    """Machine code of a function that does not raise, by Numba."""
    import numba
    from llvmlite import binding

    made = numba.cfunc(signature, **options)(function)
    module = binding.parse_assembly(made.inspect_llvm())
    for name in _declared(module):
        if name in _WHERE_IT_RAISED:
            module.link_in(binding.parse_assembly(_NEVER_CALLED.format(name=name)))
    cpu, features = target(numba.config)
    machine = binding.Target.from_triple(module.triple).create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )
    return MachineCode(made.native_name, tuple(_declared(module)), machine.emit_object(module))


_WHERE_IT_RAISED = (
    *("NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure"),
    *("numba_gil_release", "numba_runtime_build_excinfo_struct", "numba_unpickle"),
)
"""What Numba calls where a function has raised, which ours do not."""
_NEVER_CALLED = """
declare void @llvm.trap()
define void @{name}() {{
    call void @llvm.trap()
    unreachable
}}
"""


def _declared(module: Any) -> list[str]:
    """What a module uses and does not have."""
    there = (*module.functions, *module.global_variables)
    return sorted(x.name for x in there if x.is_declaration and not x.name.startswith("llvm."))


def host() -> tuple[str, str]:
    """The processor, and what it can do, as LLVM writes it: ``+avx2,-sse4a``."""
    from llvmlite import binding

    try:
        return binding.get_host_cpu_name(), str(binding.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM does not know how to ask
        return binding.get_host_cpu_name(), ""


def target(config: Any) -> tuple[str, str]:
    """The same as Numba's settings have it."""
    name, features = host()
    told = config.CPU_FEATURES
    return config.CPU_NAME or name, features if told is None else str(told)


def loaded(made: MachineCode) -> int:
    """The address of the function, in memory from now on.

    Raises OSError if something that it needs is not in this process.
    """
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    for name in made.needs:  # the engine looks for them in the whole process
        if binding.address_of_symbol(name) is None:  # at which LLVM would end the process
            raise OSError(f"no {name} in this process")
    engine.add_object_file(binding.object_file.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address(made.name))


def keep(path: Path, made: MachineCode) -> None:
    """Write a file, whole or not at all.  Raises OSError."""
    head = json.dumps({"name": made.name, "needs": made.needs}).encode() + b"\n"
    whole = head + made.code
    file, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(file, "wb") as part:
            part.write(hashlib.sha256(whole).digest() + whole)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def kept(path: Path) -> MachineCode | None:
    """What a file keeps; None if there is none, or it is damaged."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, rest = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    head, _, code = rest.partition(b"\n")
    told = json.loads(head)
    return MachineCode(told["name"], tuple(told["needs"]), code)
