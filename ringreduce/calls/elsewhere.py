"""Names of other libraries, in lower case, and the names here: for the texts of errors."""

NAMES_ELSEWHERE = {
    **dict.fromkeys(("init_process_group", "initialize", "comm_world", "mpi"), "init"),
    **dict.fromkeys(("distributeddataparallel", "distributedoptimizer"), "train.DataParallel"),
    **dict.fromkeys(("distributedgradienttape", "dataparallel"), "train.DataParallel"),
    **dict.fromkeys(("run", "launch", "multiprocessing"), "spawn"),
}
"""Functions and classes of mpi4py, Horovod and torch -> the public names here."""

_LATER = "all_reduce(..., async_op=True)"
METHODS_ELSEWHERE = {
    **dict.fromkeys(("allreduce", "grouped_allreduce", "all_reduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("iallreduce", "allreduce_async", "allreduce_async_"), _LATER),
    **dict.fromkeys(("allgather", "allgatherv", "all_gather_into_tensor"), "all_gather"),
    **dict.fromkeys(("alltoall", "alltoallv", "all_to_all_single"), "all_to_all"),
    **dict.fromkeys(("bcast", "ibcast", "broadcast_"), "broadcast"),
    **dict.fromkeys(("reduce_scatter_block", "reducescatter"), "reduce_scatter"),
    **dict.fromkeys(("reduce_scatter_tensor", "ireduce_scatter"), "reduce_scatter"),
    **dict.fromkeys(("gatherv", "igather"), "gather"),
    **dict.fromkeys(("scatterv", "iscatter"), "scatter"),
    **dict.fromkeys(("ibarrier", "join"), "barrier"),
    **dict.fromkeys(("new_group", "create_group"), "split"),
    **dict.fromkeys(("free", "disconnect", "destroy_process_group", "shutdown"), "close"),
    **dict.fromkeys(("get_size", "get_world_size", "world_size"), "size"),
    "get_rank": "rank",
    "allreduce_init": "plan",
    **dict.fromkeys(("ssend", "bsend", "rsend"), "send"),
    **dict.fromkeys(("isend", "issend"), "send(..., async_op=True)"),
    **dict.fromkeys(("receive", "mrecv"), "recv"),
    "irecv": "recv(..., async_op=True)",
    **dict.fromkeys(("sendrecv", "batch_isend_irecv"), "exchange"),
}
"""Methods of a communicator in mpi4py, Horovod and torch -> its methods and attributes here."""
ATTRIBUTES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "nodes")
"""The attributes of a communicator that are no methods."""

OPS_ELSEWHERE = {
    **dict.fromkeys(("add", "+", "plus", "total"), "sum"),
    **dict.fromkeys(("avg", "average"), "mean"),
    **dict.fromkeys(("product", "multiply", "mul", "*"), "prod"),
    **dict.fromkeys(("minimum", "amin", "fmin"), "min"),
    **dict.fromkeys(("maximum", "amax", "fmax"), "max"),
    **dict.fromkeys(("band", "land", "bitwise_and", "logical_and", "all"), "and"),
    **dict.fromkeys(("bor", "lor", "bitwise_or", "logical_or", "any"), "or"),
    **dict.fromkeys(("bxor", "lxor", "bitwise_xor", "logical_xor"), "xor"),
}
"""Ops of MPI, NCCL, Horovod and torch, and functions of NumPy -> the ops here."""

WIRES_ELSEWHERE = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Short names of the dtypes of messages -> the values of `wire` here."""
