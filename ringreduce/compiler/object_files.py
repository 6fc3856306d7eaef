"""Machine code as object files: compiled by Numba, loaded without Numba.

Importing Numba takes longer than starting MPI.  So the machine code of a compiled function is kept
as an object file, which LLVM alone loads.  A digest stands before the code in the file, because a
damaged file would end the process.
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
"""LLVM's engines, which own the loaded machine code: kept until the process ends."""


@dataclass(frozen=True)
class MachineCode:
    name: str
    needs: tuple[str, ...]
    """Symbols of other libraries, Python's among them, that the code uses."""
    code: bytes


def compile_function(
    function: Callable[..., Any], signature: Any, options: dict[str, Any]
) -> MachineCode:
    """Compile a function that does not raise, by Numba, for parameters as in `signature`."""
    import numba
    from llvmlite import binding

    made = numba.cfunc(signature, **options)(function)
    module = binding.parse_assembly(made.inspect_llvm())
    for name in _declared(module):
        if name in _CALLED_AFTER_RAISING:
            module.link_in(binding.parse_assembly(_NEVER_CALLED.format(name=name)))
    cpu, features = target(numba.config)
    machine = binding.Target.from_triple(module.triple).create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )
    return MachineCode(made.native_name, tuple(_declared(module)), machine.emit_object(module))


_CALLED_AFTER_RAISING = (
    *("NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure"),
    *("numba_gil_release", "numba_runtime_build_excinfo_struct", "numba_unpickle"),
)
"""Functions that Numba's code calls after a function has raised, which functions here never do."""
_NEVER_CALLED = """
declare void @llvm.trap()
define void @{name}() {{
    call void @llvm.trap()
    unreachable
}}
"""


def _declared(module: Any) -> list[str]:
    symbols = (*module.functions, *module.global_variables)
    return sorted(x.name for x in symbols if x.is_declaration and not x.name.startswith("llvm."))


def host() -> tuple[str, str]:
    """Return the processor's name and its features, as LLVM writes them: ``+avx2,-sse4a``."""
    from llvmlite import binding

    try:
        return binding.get_host_cpu_name(), str(binding.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM cannot find the features on this system
        return binding.get_host_cpu_name(), ""


def target(config: Any) -> tuple[str, str]:
    """Return the processor's name and features that Numba's settings ask for, or else `host`'s."""
    name, features = host()
    given = config.CPU_FEATURES
    return config.CPU_NAME or name, features if given is None else str(given)


def load(made: MachineCode) -> int:
    """Load a function for good; return its address.  OSError if a symbol is missing."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    for name in made.needs:
        # The engine searches the whole process.  For a missing symbol LLVM would end the process.
        if binding.address_of_symbol(name) is None:
            raise OSError(f"no {name} in this process")
    engine.add_object_file(binding.object_file.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address(made.name))


def write(path: Path, made: MachineCode) -> None:
    """Write a function to the file `path`, as a whole or not at all.  Raises OSError."""
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


def read(path: Path) -> MachineCode | None:
    """Read a function from the file `path`; None if there is no such file, or it is damaged."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, rest = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    head, _, code = rest.partition(b"\n")
    symbols = json.loads(head)
    return MachineCode(symbols["name"], tuple(symbols["needs"]), code)
