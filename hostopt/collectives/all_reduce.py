"""All-reduce in place: over the network, or in shared memory if ranks share a host."""

from __future__ import annotations

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.channel import Channel
from hostopt.collectives.host_memory import HostMemory
from hostopt.collectives.network import Network
from hostopt.collectives.reduce_op import ReduceOp, check_dtype
from hostopt.collectives.tensor_list_view import TensorListView
from hostopt.collectives.wire_format import WireFormat
from hostopt.errors import ConfigError
from hostopt.transport.signature import UNSIGNED, signature_of


def all_reduce_in_place(
    channel: Channel,
    memory: HostMemory | None,
    network: Network,
    flat: Array,
    op: ReduceOp,
    call: CollectiveCall,
    wire_format: WireFormat | None = None,
    source: TensorListView | None = None,
) -> None:
    """Reduces a flat array over all ranks; see `Communicator.all_reduce_in_place`."""
    check_dtype(flat.dtype, op)
    if wire_format is not None and (op is not ReduceOp.SUM or flat.dtype != np.float32):
        raise ConfigError(
            f"{op.name} of {flat.dtype.name} cannot be sent as {wire_format.name}. Only a SUM of "
            "float32 can be"
        )
    if call.signature is UNSIGNED:
        call = _signed(call, op, flat, wire_format)
    channel.begin(call)
    hierarchical = None
    if memory is not None:
        hierarchical = memory.hierarchical(flat.nbytes, call.signature.text)
    if hierarchical is not None:
        hierarchical.all_reduce(flat, op.ufunc, call, wire_format, source)
    else:
        if source is not None:
            source.copy_to(flat)
        network.group(call, wire_format).all_reduce(call, flat, op.ufunc)
    if op is ReduceOp.AVERAGE:
        np.divide(flat, flat.dtype.type(channel.size), out=flat)


def _signed(
    call: CollectiveCall, op: ReduceOp, flat: Array, wire_format: WireFormat | None
) -> CollectiveCall:
    format_name = "" if wire_format is None else wire_format.name
    kind = f"all_reduce({op.value})"
    signature = signature_of(kind, call.name, flat.dtype, flat.shape, format_name)
    return call._replace(signature=signature)
