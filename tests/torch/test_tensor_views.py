"""Views of tensors by functions of C: in compiled code, and in the same code run as Python."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from ringreduce.shm.tensor_views import Tensors, compiled_viewer, view_tensor

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch has no exchange API yet"
)
DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@pytest.fixture(scope="module", params=["compiled", "uncompiled"])
def viewed(request):
    """The function that returns a view; None if Python has to view the tensor."""
    if request.param == "compiled":
        return compiled_viewer() or pytest.skip("nothing is compiled here")
    tensors = Tensors()
    tensors.look()

    def view(tensor):
        address = view_tensor(tensors.views, id(tensor))
        if address == 0:
            return None
        array = ctypes.cast(address, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(address))  # `array` has a reference of its own
        return array

    return view


def by_torch(tensor):
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def facts(array):
    return array.ctypes.data, array.dtype, array.shape, array.strides, array.flags.num & ~0x4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x,
        lambda x: x[1:, ::2],
        lambda x: x.T,
        lambda x: x[0, 0],
        lambda x: x[:, :1].expand(4, 3),
    ],
)
def test_a_view_is_what_torch_makes(viewed, dtype, cut):
    tensor = cut(torch.arange(24).reshape(4, 6).to(dtype))
    made, wanted = viewed(tensor), by_torch(tensor)
    assert facts(made) == facts(wanted)
    np.testing.assert_array_equal(made, wanted)


def test_a_view_writes_the_tensor_and_has_the_dtype_of_other_arrays(viewed):
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    array = viewed(tensor)
    array[...] = 2
    assert tensor.tolist() == [2, 2, 2]
    assert array.dtype is np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,  # negated, not in memory
        lambda: torch.ones(3, dtype=torch.float8_e4m3fn),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.ones(0),
        lambda: torch.ones((1,) * 9),
    ],
)
def test_python_views_what_compiled_code_cannot(viewed, tensor):
    assert viewed(tensor()) is None


def test_a_view_keeps_its_tensor_and_nothing_else_does(viewed):
    tensor, dtype = torch.ones(3), np.dtype(np.float32)
    of_tensor, of_dtype = sys.getrefcount(tensor), sys.getrefcount(dtype)
    array = viewed(tensor)
    assert (sys.getrefcount(tensor), sys.getrefcount(dtype)) == (of_tensor + 1, of_dtype + 1)
    del array
    assert (sys.getrefcount(tensor), sys.getrefcount(dtype)) == (of_tensor, of_dtype)
    array, gone = viewed(tensor), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert array.tolist() == [1, 1, 1]
    del array
    assert gone() is None


def test_without_the_api_python_views_all(monkeypatch):
    for api in (None, 7, sys.modules["datetime"].datetime_CAPI):
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", api)
        tensors = Tensors()
        tensors.look()
        assert tensors.views.type == 0
