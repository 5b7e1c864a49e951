"""What the rules of every call share: where calls run, the common arguments, a list of faults."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from .abi import MAX_ROW_BYTES, VECTOR_BYTES, Flag
from .arrays import ArrayView, view
from .errors import ArgumentError
from .formats import Format, hidden_problem, parse_quant, scales_of
from .plan import choose_oneshot
from .types import DType

__all__ = ["ACTIVATIONS", "QUANTISED", "Checker", "Home", "comm_dtype_of", "row_problem"]

ACTIVATIONS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
QUANTISED = ("quant_out", "scale_out")
MAX_TOKENS = 2**30  # the kernels count in 32 bits, and sums of two row numbers too
_UNTYPED = ("uint16", "uint32", "int16", "void16", "void32", "V2", "V4")


@dataclass(frozen=True, slots=True)
class Home:
    """Where calls run: what of the workspace the rules need.

    Attributes:
        device: CUDA ordinal, or `arrays.CPU`.
        dtype: Default activation dtype.
        comm_dtype: Default wire dtype; None is the activation dtype.
        rank: Own rank.
        world_size: Number of ranks.
        payload_bytes: Most bytes of a call: tokens x hidden_dim x item of the wire dtype.
        oneshot_bytes: Most bytes of a call that is served by one-shot; no more than the former.
    """

    device: int
    dtype: DType
    comm_dtype: DType | None
    rank: int
    world_size: int
    payload_bytes: int
    oneshot_bytes: int


def comm_dtype_of(dtype: DType, comm_dtype: DType | str | None) -> DType:
    """Return the wire dtype for an activation dtype.

    Raises:
        ValueError: It is neither the activation dtype nor float32.
    """
    wire = dtype if comm_dtype is None else DType.parse(comm_dtype)
    if wire not in (dtype, DType.FLOAT32):
        raise ValueError(
            f"comm_dtype must be {dtype.value} (the activation dtype) or float32; got {wire.value}"
        )
    return wire


def row_problem(hidden_dim: int, dtype: DType) -> str | None:
    """Say why rows of `hidden_dim` elements cannot be served; None if they can."""
    row_bytes = hidden_dim * dtype.itemsize
    if hidden_dim < 1 or row_bytes % VECTOR_BYTES:
        return (
            f"hidden_dim must be a positive multiple of {VECTOR_BYTES // dtype.itemsize} "
            f"(16 bytes of {dtype.value}); got {hidden_dim}"
        )
    if row_bytes > MAX_ROW_BYTES:
        return (
            f"hidden_dim must be at most {MAX_ROW_BYTES // dtype.itemsize} for {dtype.value}; "
            f"got {hidden_dim}"
        )
    return None


class Checker:
    """Checks the arguments of one call and collects the faults, so that all are reported together.

    Attributes:
        dtype: Activation dtype of the call.
        comm_dtype: Its wire dtype.
        token_num: Rows of the result, once `sizes` has been called.
        hidden_dim: Elements of a row, likewise.
        views: The arrays that were given and have a right dtype, by argument name.
        flags: Bits for the kernel.
        quant: Format of the quantised outputs, or None.
        scale_factor: The scale that is given as a number; 1 where there is none.
    """

    def __init__(
        self, function: str, home: Home, dtype: DType | str | None, comm_dtype: DType | str | None
    ) -> None:
        """Settle the dtypes; where one of them is wrong the workspace's stands in."""
        self.function = function
        self.home = home
        self.faults: list[str] = []
        self.views: dict[str, ArrayView] = {}
        self.flags = Flag(0)
        self.quant: str | None = None
        self.scale_factor = 1.0
        self.token_num = self.hidden_dim = 0
        self._sized = True
        self._alignments: dict[str, int] = {}
        self.dtype = home.dtype
        try:
            activation = home.dtype if dtype is None else DType.parse(dtype)
            if activation not in ACTIVATIONS:
                raise ValueError(
                    f"dtype must be bfloat16, float16 or float32; got {activation.value}"
                )
            self.dtype = activation
        except ValueError as error:
            self.fault(str(error))
        self.comm_dtype = self.dtype
        try:
            if comm_dtype is None and self.dtype is home.dtype:
                comm_dtype = home.comm_dtype
            self.comm_dtype = comm_dtype_of(self.dtype, comm_dtype)
        except ValueError as error:
            self.fault(str(error))

    @property
    def own(self) -> tuple[DType, ...]:
        """The activation dtype alone."""
        return (self.dtype,)

    @property
    def own_or_float(self) -> tuple[DType, ...]:
        """What scales and gamma may have."""
        return self.own if self.dtype is DType.FLOAT32 else (self.dtype, DType.FLOAT32)

    def fault(self, words: str) -> None:
        """Note a fault."""
        self.faults.append(words)

    def raise_faults(self) -> None:
        """Raise what was noted."""
        if self.faults:
            raise ArgumentError(self.function, self.faults)

    # ---- arrays ------------------------------------------------------------------------------

    def array(
        self, name: str, obj: Any, dtypes: tuple[DType, ...], alignment: int | None = VECTOR_BYTES
    ) -> ArrayView | None:
        """View an array and check what does not depend on the other arguments.

        Args:
            name: The argument's.
            obj: What was given for it.
            dtypes: Those that it may have; an untyped array is taken for the first of its item
                size.
            alignment: Of the first element, in bytes; None is the item size.

        Returns:
            None if there is no array of such a dtype.
        """
        try:
            found = view(obj)
            if found.dtype not in dtypes and found.dtype_name in _UNTYPED:
                for dtype in dtypes:
                    if dtype.itemsize == found.itemsize:
                        found = found._replace(dtype=dtype)
                        break
        except (TypeError, ValueError) as error:
            self.fault(f"{name}: {error}")
            return None
        if found.device != self.home.device:
            self.fault(
                f"{name} must be on {_place(self.home.device)}, where the workspace is; "
                f"got an array on {_place(found.device)}"
            )
        if found.dtype not in dtypes:
            allowed = " or ".join(dtype.value for dtype in dtypes)
            self.fault(f"{name} must have dtype {allowed}; got {found.dtype_name}")
            return None
        if not found.contiguous:
            self.fault(
                f"{name} must be contiguous in C order; got shape {found.shape} with strides "
                f"{found.strides} bytes"
            )
        self.views[name] = found
        self._alignments[name] = alignment or found.itemsize
        return found

    def leading(
        self,
        name: str,
        obj: Any,
        ndim: int,
        meaning: str,
        dtypes: tuple[DType, ...] = (),
        alignment: int | None = VECTOR_BYTES,
    ) -> tuple[int, ...]:
        """View an array that sizes are taken from; return its shape, -1s where it has none."""
        found = self.array(name, obj, dtypes or self.own, alignment)
        if found is None or found.ndim == ndim:
            return found.shape if found is not None else (-1,) * ndim
        self.fault(f"{name} must have shape {meaning}; got {found.shape}")
        return (-1,) * ndim

    def shape(self, name: str, expected: tuple[int, ...], meaning: str) -> None:
        """Check the shape of a viewed array."""
        found = self.views.get(name)
        if self._sized and found is not None and found.shape != expected:
            self.fault(f"{name} must have shape {meaning} = {expected}; got {found.shape}")

    def rows(self, **arrays: Any) -> None:
        """View arrays of T `[token_num, hidden_dim]`, those that are given."""
        for name, obj in arrays.items():
            if obj is not None:
                self.array(name, obj, self.own)
                self.shape(name, (self.token_num, self.hidden_dim), "[token_num, hidden_dim]")

    # ---- sizes -------------------------------------------------------------------------------

    def sizes(self, token_num: int, hidden_dim: int, named_by: str) -> None:
        """Take the sizes of the call; where one is unknown (-1) nothing is compared with them."""
        self._sized = token_num >= 0 and hidden_dim >= 0
        if not self._sized:
            return
        self.token_num, self.hidden_dim = token_num, hidden_dim
        problem = row_problem(hidden_dim, self.dtype)
        if problem:
            self.fault(f"{named_by}: {problem}")

    def capacity(self, named_by: str, use_oneshot: bool | None = False) -> str:
        """Check that the call fits; return its protocol, of one-shot and two-shot."""
        home = self.home
        row_bytes = self.hidden_dim * self.comm_dtype.itemsize
        sent = self.token_num * row_bytes
        try:
            known = use_oneshot in (None, True, False)
        except ValueError:  # an array
            known = False
        if not known:
            self.fault(f"use_oneshot must be True, False or None; got {use_oneshot!r}")
            use_oneshot = None
        if use_oneshot is None:
            use_oneshot = choose_oneshot(sent, home.world_size, home.oneshot_bytes)
        capacity = home.oneshot_bytes if use_oneshot else home.payload_bytes
        if sent > capacity or self.token_num > MAX_TOKENS:
            self.fault(
                f"{named_by}: {self.token_num} tokens of hidden_dim {self.hidden_dim} send {sent} "
                f"bytes as {self.comm_dtype.value}; the workspace's "
                f"{'one-shot ' if use_oneshot else ''}capacity is {capacity} bytes "
                f"({capacity // max(row_bytes, 1)} such tokens)"
            )
        return "oneshot" if use_oneshot else "twoshot"

    # ---- what several operations take ----------------------------------------------------------

    def gamma(self, rms_gamma: Any, norm_out: Any, quant: Any = None) -> None:
        """Check the weights of the norm, which `quant` needs too."""
        if rms_gamma is not None:
            found = self.array("rms_gamma", rms_gamma, self.own_or_float)
            self.shape("rms_gamma", (self.hidden_dim,), "[hidden_dim]")
            if found is not None and found.dtype is DType.FLOAT32:
                self.flags |= Flag.GAMMA_IS_FLOAT32
        elif norm_out is not None or quant is not None:
            name = "quant" if norm_out is None else "norm_out"
            self.fault(f"{name} needs rms_gamma; got None")

    def quantised(
        self,
        quant: Any,
        quant_out: Any,
        scale_out: Any,
        scale_factor: Any,
        scale_layout: Any,
        scale_dtype: Any,
    ) -> None:
        """Check all that has to do with quantised outputs."""
        given = {"quant_out": quant_out, "scale_out": scale_out, "scale_factor": scale_factor,
                 "scale_layout": scale_layout, "scale_dtype": scale_dtype}  # fmt: skip
        if quant is None:
            for name, value in given.items():
                if value is not None:
                    self.fault(f"{name} needs quant; got None")
            return
        try:
            fmt = parse_quant(quant)
            scales = scales_of(fmt, self.token_num, self.hidden_dim, scale_layout, scale_dtype)
        except ValueError as error:
            self.fault(str(error))
            return
        self.quant = fmt.name
        problem = hidden_problem(fmt, self.hidden_dim)
        if problem and self._sized:
            self.fault(problem)
        if scales.layout != "row_major":
            self.flags |= Flag.SCALE_TILED
        if scales.dtype == "ue8m0":
            self.flags |= Flag.SCALE_IS_UE8M0
        self._given_scale(fmt, scale_factor)
        if quant_out is None:
            self.fault(f"quant {fmt.name!r} needs quant_out; got None")
        elif self._bytes("quant_out", quant_out, fmt.code_dtypes):
            columns = self.hidden_dim * fmt.code_bits // 8
            words = "hidden_dim" if fmt.code_bits == 8 else "hidden_dim / 2"
            self.shape("quant_out", (self.token_num, columns), f"[token_num, {words}]")
        if fmt.has_scales != (scale_out is not None):
            needs = "needs" if fmt.has_scales else "makes no"
            self.fault(f"quant {fmt.name!r} {needs} scale_out; got {_type_of(scale_out)}")
        elif scale_out is not None:
            found = self._bytes("scale_out", scale_out, scales.array_dtypes)
            sized = self._sized and not problem
            if sized and found is not None and found.nbytes != scales.nbytes:
                self.fault(
                    f"scale_out must have {scales.nbytes} bytes (scale_size), such as "
                    f"{scales.shape} of {scales.array_dtypes[0]}; got {found.nbytes} bytes, "
                    f"{found.shape} of {found.dtype_name}"
                )

    def _bytes(self, name: str, obj: Any, names: tuple[str, ...]) -> ArrayView | None:
        """View an array whose element type has one of `names`; FP8 and FP4 count as bytes."""
        known = [DType.UINT8 if name not in ("float32", "int32") else DType(name) for name in names]
        found = self.array(name, obj, tuple(dict.fromkeys(known)))
        if found is not None and found.dtype_name not in names:
            self.fault(f"{name} must have dtype {' or '.join(names)}; got {found.dtype_name}")
        return found

    def _given_scale(self, fmt: Format, scale_factor: Any) -> None:
        if fmt.needs_scale != (scale_factor is not None):
            needs = "needs a" if fmt.needs_scale else "takes no"
            self.fault(f"quant {fmt.name!r} {needs} scale_factor; got {_type_of(scale_factor)}")
        elif isinstance(scale_factor, numbers.Real):
            self.scale_factor = self.number("scale_factor", scale_factor)
            if self.scale_factor < 2.0**-149:
                self.fault(f"scale_factor must be positive as float32; got {scale_factor!r}")
        elif scale_factor is not None:
            found = self.array("scale_factor", scale_factor, (DType.FLOAT32,), None)
            if found is not None and math.prod(found.shape) != 1:
                self.fault(f"scale_factor must have one element; got shape {found.shape}")

    def number(self, name: str, value: Any, *, minimum: float | None = None) -> float:
        """Return a number that is finite as float32, which is what the kernel gets."""
        try:
            result = float(value)
        except (TypeError, ValueError):
            self.fault(f"{name} must be a number; got {value!r}")
            return math.nan
        except OverflowError:
            self.fault(f"{name} must be finite; got an integer beyond float64")
            return math.nan
        if not abs(result) < 2.0**128 - 2.0**103 or (minimum is not None and result < minimum):
            at_least = "" if minimum is None else f" and at least {minimum:g}"
            self.fault(f"{name} must be finite{at_least}; got {value!r}")
        return result

    # ---- memory ------------------------------------------------------------------------------

    def memory(self, outputs: tuple[str, ...], in_place: tuple[str, ...]) -> None:
        """Check where the arrays lie, and raise all faults.

        A call without tokens touches no memory, so that anything goes.

        Args:
            outputs: Names of what is written; at least one of them must be given.
            in_place: What an output that is not quantised may be exactly; else it overlaps nothing.
        """
        enough = tuple(name for name in outputs if name != "scale_out")
        if not any(name in self.views for name in enough):
            given = enough[0] if len(enough) == 1 else f"at least one of {_list(enough)}"
            self.fault(f"{given} must be given")
        if self.token_num > 0:
            used = {name: found for name, found in self.views.items() if 0 not in found.shape}
            for name, found in used.items():
                alignment = self._alignments[name]
                if found.ptr % alignment:
                    self.fault(
                        f"{name} must start on a {alignment}-byte boundary; "
                        f"got address {found.ptr:#x}"
                    )
                if name in outputs and found.readonly:
                    self.fault(f"{name} must be writable; got a read-only array")
            self._overlaps(used, outputs, in_place)
        self.raise_faults()

    def _overlaps(
        self, used: dict[str, ArrayView], outputs: tuple[str, ...], in_place: tuple[str, ...]
    ) -> None:
        extents = [(name, *found.extent) for name, found in used.items()]
        for i, (name, first, end) in enumerate(extents):
            if name not in outputs:
                continue
            for j, (other, other_first, other_end) in enumerate(extents):
                if first >= other_end or other_first >= end or i == j:
                    continue
                if other in outputs:
                    if i < j:
                        self.fault(f"{name} and {other} must not overlap")
                elif other not in in_place or name in QUANTISED:
                    self.fault(f"{name} must not overlap {other}")
                elif (first, end) != (other_first, other_end):
                    self.fault(f"{name} must be exactly {other} or not overlap it at all")


def _list(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _type_of(obj: Any) -> str:
    return "None" if obj is None else type(obj).__name__


def _place(device: int) -> str:
    return "the CPU" if device < 0 else f"CUDA device {device}"
