"""The time loops of the CPU backend, compiled by numba: explicit vectors over keys, no thread knows of another.

A `Vector` is 64 bytes of floats. Written out by hand because LLVM vectorizes none of these loops by itself (sums over
keys are ordered, a dozen arrays might overlap), and so that nothing depends on what it recognizes or on fast-math:
division and infinities are IEEE's. All arrays are flat; `Sizes` gives their shapes.

One file, vectors and loops together: numba's cache between processes looks at the file of a compiled function only.
"""

import operator
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

VECTOR_BYTES = 64


class Sizes(NamedTuple):
    """Shapes: q, k [G, N / W, T, W]; v [T, H, P]; beta [T, H, g]; M [rows, H, P, N]; J [rows, H, g, N].

    T counts the tokens of all rows, a vector has W numbers, N is padded to whole ones. The heads of a group are cut
    into `tiles` ranges of beta groups each, which are shared out among `slices`: every (row, group, slice) is a
    piece of work that one thread does alone. States are kept every `chunk` tokens.
    """

    T: int
    G: int
    H: int
    P: int
    g: int
    N: int
    tiles: int
    slices: int
    chunk: int


class Inputs(NamedTuple):
    """Flat arrays. q, k, v, beta and states as in `Sizes`; decay [T, H], prior [H]; kept states [kept, H, ...].

    Nothing is kept where `M_kept` is empty.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    beta: np.ndarray
    decay: np.ndarray
    prior: np.ndarray
    M: np.ndarray
    J: np.ndarray
    M_kept: np.ndarray
    J_kept: np.ndarray


class Gradients(NamedTuple):
    """Those of the results, and of the inputs, which are written.

    M and J go from final to initial states in place; q and k [slices, G, N / W, T, W] are added to; decay
    [T, H, tiles] is that of its logarithm; prior [rows, H, tiles] is fp64. `variance` may be empty.
    """

    out: np.ndarray
    variance: np.ndarray
    M: np.ndarray
    J: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    beta: np.ndarray
    decay: np.ndarray
    prior: np.ndarray


class Chunk(NamedTuple):
    """One chunk of one beta group in a core's cache: numbers per token, and vectors [tokens, W] (`*_v`, `M`, `do` and
    `value` for each channel).

    Attributes:
        decay: with beta, value and, backward, do and d_var: the inputs.
        J: the states of every token, backward.
        ratio: q / I.
        D: sum over channels of do M.
        over_b: sums over keys to be, of the results forward, of the gradients backward.
        cross: [tokens + 1, W], what the gradients of the states carry over the border before each token.
    """

    decay: np.ndarray
    beta: np.ndarray
    d_var: np.ndarray
    value: np.ndarray
    do: np.ndarray
    J: np.ndarray
    M: np.ndarray
    ratio: np.ndarray
    D: np.ndarray
    over_b: np.ndarray
    over_v: np.ndarray
    cross: np.ndarray


class Vector(types.Type):
    """As many numbers of `dtype` as a vector has."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.width = VECTOR_BYTES * 8 // dtype.bitwidth
        super().__init__(name=f"Vector({dtype}, {self.width})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        element = manager.lookup(vector.dtype).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, vector.width))


def _address(context, builder, array_type, array, index, vector):
    first = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    return builder.bitcast(first, vector.as_pointer())


@intrinsic
def load(typing, array, index):
    """The vector that starts at array[index]."""
    vector = Vector(array.dtype)

    def generate(context, builder, signature, args):
        address = _address(context, builder, array, *args, context.get_value_type(vector))
        return builder.load(address, align=array.dtype.bitwidth // 8)

    return vector(array, types.intp), generate


@intrinsic
def store(typing, array, index, vector):
    """Write a vector at array[index]."""

    def generate(context, builder, signature, args):
        address = _address(context, builder, array, *args[:2], args[2].type)
        builder.store(args[2], address, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


def _shuffle(builder, vector, picks):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(picks)), picks)
    return builder.shuffle_vector(vector, vector, mask)


@intrinsic
def splat(typing, number):
    """A vector of one number throughout."""
    vector = Vector(number)

    def generate(context, builder, signature, args):
        nothing = ir.Constant(context.get_value_type(vector), ir.Undefined)
        first = builder.insert_element(nothing, args[0], ir.Constant(ir.IntType(32), 0))
        return _shuffle(builder, first, [0] * vector.width)

    return vector(number), generate


@intrinsic
def total(typing, vector):
    """The sum over a vector, halves first."""

    def generate(context, builder, signature, args):
        rest, width = args[0], vector.width
        while width > 1:
            width //= 2
            low, high = _shuffle(builder, rest, [*range(width)]), _shuffle(builder, rest, [*range(width, 2 * width)])
            rest = builder.fadd(low, high)
        return builder.extract_element(rest, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), generate


@intrinsic
def fma(typing, x, y, z):
    """x y + z, rounded once."""

    def generate(context, builder, signature, args):
        kind = args[0].type
        name = f"llvm.fma.v{x.width}f{x.dtype.bitwidth}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, args)

    return x(x, y, z), generate


def _elementwise(symbol, instruction):
    @intrinsic
    def compute(typing, x, y):
        return x(x, y), lambda context, builder, signature, args: getattr(builder, instruction)(*args)

    @overload(symbol)
    def choose(x, y):
        if isinstance(x, Vector) and x == y:
            return lambda x, y: compute(x, y)


for _symbol, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _elementwise(getattr(operator, _symbol), _instruction)


def _compiled(function):
    """Compiled at its first call, kept between processes where there is a folder to keep it in."""
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # neither beside this file nor in the user's cache folder may be written
        return njit(nogil=True, error_model="numpy")(function)


_inlined = njit(forceinline=True, no_cpython_wrapper=True, error_model="numpy")


@_inlined
def _piece(z, item):
    """Row, group and units first..last of a piece of work; unit u of a group is tile u % tiles of head u // tiles."""
    units = z.H // z.G * z.tiles
    s = item % z.slices
    group = item // z.slices
    return group // z.G, group % z.G, s * units // z.slices, (s + 1) * units // z.slices


@_inlined
def _gather(source, first, stride, count, target, at):
    for t in range(count):
        target[at + t] = source[first + t * stride]


@_inlined
def _scatter(vectors, at, count, target, first, stride):
    """Sums over vectors, one per token, to where the token is."""
    W = VECTOR_BYTES // vectors.itemsize
    for t in range(count):
        target[first + t * stride] = total(load(vectors, at + t * W))


@_inlined
def _clear(vectors, count):
    W = VECTOR_BYTES // vectors.itemsize
    zero = splat(vectors.dtype.type(0))
    for t in range(count):
        store(vectors, t * W, zero)


@_inlined
def _copy(source, i, target, j, count):
    for n in range(count):
        target[j + n] = source[i + n]


@_inlined
def _new_chunk(z, like, backward):
    """Scratch; a forward pass needs no states and no gradients."""
    W, channels = VECTOR_BYTES // like.itemsize, z.P // z.g
    count = z.chunk
    behind = count if backward else 0
    return Chunk(
        np.empty(count, like.dtype),
        np.empty(count, like.dtype),
        np.zeros(behind, like.dtype),
        np.empty(count * channels, like.dtype),
        np.empty(behind * channels, like.dtype),
        np.empty(behind * W, like.dtype),
        np.empty(behind * W * channels, like.dtype),
        np.empty(count * W, like.dtype),
        np.empty(behind * W, like.dtype),
        np.empty(count * W, like.dtype),
        np.empty(count * W * channels, like.dtype),
        np.empty((behind + 1) * W, like.dtype),
    )


@_compiled
def forward(z, rows, first, last, x, out, variance):
    """Pieces first..last of `out` and of `variance` unless that is empty; states go from initial to final in place.

    rows [rows, 3]: first token, behind the last, place of the first kept state.
    """
    W, channels, groups = VECTOR_BYTES // x.q.itemsize, z.P // z.g, z.g // z.tiles
    s = _new_chunk(z, x.q, False)
    for item in range(first, last):
        row, group, unit, end = _piece(z, item)
        start, stop, place = rows[row]
        for u in range(unit, end):
            h, tile = group * (z.H // z.G) + u // z.tiles, u % z.tiles
            prior = splat(x.prior[h])
            for t0 in range(start, stop, z.chunk):
                count = min(z.chunk, stop - t0)
                _gather(x.decay, t0 * z.H + h, z.H, count, s.decay, 0)
                for g in range(tile * groups, (tile + 1) * groups):
                    lane = (t0 * z.H + h) * z.g + g
                    J0 = ((row * z.H + h) * z.g + g) * z.N
                    M0 = J0 * channels
                    if t0 > start and x.M_kept.size:
                        kept = (((place + (t0 - start) // z.chunk - 1) * z.H + h) * z.g + g) * z.N
                        _copy(x.J, J0, x.J_kept, kept, z.N)
                        _copy(x.M, M0, x.M_kept, kept * channels, channels * z.N)
                    _gather(x.beta, lane, z.H * z.g, count, s.beta, 0)
                    for c in range(channels):
                        _gather(x.v, lane * channels + c, z.H * z.P, count, s.value, c * z.chunk)
                    _clear(s.over_v, z.chunk * channels)
                    _clear(s.over_b, z.chunk)
                    for n in range(z.N // W):
                        key = ((group * (z.N // W) + n) * z.T + t0) * W
                        if channels == 1 and not variance.size:
                            _own_forward(x, s, count, key, J0 + n * W, M0 + n * W, prior)
                        else:
                            _shared_forward(z, x, s, count, key, J0 + n * W, M0 + n * W, prior)
                    for c in range(channels):
                        _scatter(s.over_v, c * z.chunk * W, count, out, lane * channels + c, z.H * z.P)
                    if variance.size:
                        _scatter(s.over_b, 0, count, variance, lane, z.H * z.g)


@_inlined
def _own_forward(x, s, count, key, J0, M0, prior):
    """A vector of keys, at `key` of the first token, of one channel with its own beta."""
    W = VECTOR_BYTES // x.q.itemsize
    j, m = load(x.J, J0), load(x.M, M0)
    for t in range(count):
        at = t * W
        keys, decay = load(x.k, key + at), splat(s.decay[t])
        j = fma(decay, j, splat(s.beta[t]) * (keys * keys))
        m = fma(decay, m, splat(s.value[t]) * keys)
        store(s.over_v, at, fma(m, load(x.q, key + at) / (j + prior), load(s.over_v, at)))
    store(x.J, J0, j)
    store(x.M, M0, m)


@_inlined
def _shared_forward(z, x, s, count, key, J0, M0, prior):
    """The same for channels that share a beta, and with the variance."""
    W = VECTOR_BYTES // x.q.itemsize
    j = load(x.J, J0)
    for t in range(count):
        at = t * W
        keys, queries = load(x.k, key + at), load(x.q, key + at)
        j = fma(splat(s.decay[t]), j, splat(s.beta[t]) * (keys * keys))
        ratio = queries / (j + prior)
        store(s.ratio, at, ratio)
        store(s.over_b, at, fma(ratio, queries, load(s.over_b, at)))
    store(x.J, J0, j)
    for c in range(z.P // z.g):
        m, lane = load(x.M, M0 + c * z.N), c * z.chunk
        for t in range(count):
            at = (lane + t) * W
            m = fma(splat(s.decay[t]), m, splat(s.value[lane + t]) * load(x.k, key + t * W))
            store(s.over_v, at, fma(m, load(s.ratio, t * W), load(s.over_v, at)))
        store(x.M, M0 + c * z.N, m)


@_compiled
def backward(z, rows, first, last, x, d):
    """Pieces first..last of the gradients; `x` holds initial states."""
    W, channels, groups = VECTOR_BYTES // x.q.itemsize, z.P // z.g, z.g // z.tiles
    s = _new_chunk(z, x.q, True)
    for item in range(first, last):
        row, group, unit, end = _piece(z, item)
        start, stop, place = rows[row]
        for u in range(unit, end):
            h, tile = group * (z.H // z.G) + u // z.tiles, u % z.tiles
            prior, d_prior = splat(x.prior[h]), 0.0
            for chunk in range((stop - start - 1) // z.chunk, -1, -1):
                t0 = start + chunk * z.chunk
                count = min(z.chunk, stop - t0)
                _gather(x.decay, t0 * z.H + h, z.H, count, s.decay, 0)
                _clear(s.cross, z.chunk + 1)
                for g in range(tile * groups, (tile + 1) * groups):
                    lane = (t0 * z.H + h) * z.g + g
                    _gather(x.beta, lane, z.H * z.g, count, s.beta, 0)
                    if d.variance.size:
                        _gather(d.variance, lane, z.H * z.g, count, s.d_var, 0)
                    for c in range(channels):
                        _gather(x.v, lane * channels + c, z.H * z.P, count, s.value, c * z.chunk)
                        _gather(d.out, lane * channels + c, z.H * z.P, count, s.do, c * z.chunk)
                    _clear(s.over_b, z.chunk)
                    _clear(s.over_v, z.chunk * channels)
                    D0 = ((row * z.H + h) * z.g + g) * z.N
                    J, M, J0 = x.J, x.M, D0
                    if chunk:
                        J, M, J0 = x.J_kept, x.M_kept, (((place + chunk - 1) * z.H + h) * z.g + g) * z.N
                    for n in range(z.N // W):
                        key = ((group * (z.N // W) + n) * z.T + t0) * W
                        dkey = item % z.slices * x.k.size + key
                        j0, m0, d0, e0 = J0 + n * W, J0 * channels + n * W, D0 + n * W, D0 * channels + n * W
                        if channels == 1 and not d.variance.size:
                            d_prior += _own_backward(x, d, s, count, key, dkey, J, j0, M, m0, d0, e0, prior)
                        else:
                            d_prior += _shared_backward(z, x, d, s, count, key, dkey, J, j0, M, m0, d0, e0, prior)
                    _scatter(s.over_b, 0, count, d.beta, lane, z.H * z.g)
                    for c in range(channels):
                        _scatter(s.over_v, c * z.chunk * W, count, d.v, lane * channels + c, z.H * z.P)
                _scatter(s.cross, 0, count, d.decay, (t0 * z.H + h) * z.tiles + tile, z.H * z.tiles)
            d.prior[(row * z.H + h) * z.tiles + tile] = d_prior


@_inlined
def _own_backward(x, d, s, count, key, dkey, J, J0, M, M0, D0, E0, prior):
    """A vector of keys of one channel with its own beta: forward for its states, then backward.

    The chunk starts from J at J0 and M at M0; gradients of states are at D0 of d.J and E0 of d.M. Gives what these
    keys add to the gradient of the prior.
    """
    W, one = VECTOR_BYTES // x.q.itemsize, splat(x.q.dtype.type(1))
    j, m = load(J, J0), load(M, M0)
    for t in range(count):
        keys, decay = load(x.k, key + t * W), splat(s.decay[t])
        j = fma(decay, j, splat(s.beta[t]) * (keys * keys))
        m = fma(decay, m, splat(s.value[t]) * keys)
        store(s.J, t * W, j)
        store(s.M, t * W, m)
    dj, dm, d_prior = load(d.J, D0), load(d.M, E0), splat(x.q.dtype.type(0))
    for i in range(count):
        t = count - 1 - i
        at = t * W
        j, m = load(s.J, at), load(s.M, at)
        store(s.cross, at + W, fma(dj, j, fma(dm, m, load(s.cross, at + W))))
        keys, r, decay = load(x.k, key + at), one / (j + prior), splat(s.decay[t])
        ratio, do = load(x.q, key + at) * r, splat(s.do[t])
        F = do * (m * r)
        E = ratio * F
        d_prior = d_prior - E
        dj = dj - E
        dm = fma(do, ratio, dm)
        store(s.over_b, at, fma(dj, keys * keys, load(s.over_b, at)))
        store(s.over_v, at, fma(dm, keys, load(s.over_v, at)))
        store(d.q, dkey + at, load(d.q, dkey + at) + F)
        from_J = fma(splat(s.beta[t] + s.beta[t]) * keys, dj, load(d.k, dkey + at))
        store(d.k, dkey + at, fma(splat(s.value[t]), dm, from_J))
        dj = dj * decay
        dm = dm * decay
    store(s.cross, 0, fma(dj, load(J, J0), fma(dm, load(M, M0), load(s.cross, 0))))
    store(d.J, D0, dj)
    store(d.M, E0, dm)
    return total(d_prior)


@_inlined
def _shared_backward(z, x, d, s, count, key, dkey, J, J0, M, M0, D0, E0, prior):
    """The same for channels that share a beta, and with the gradient of the variance."""
    W, channels = VECTOR_BYTES // x.q.itemsize, z.P // z.g
    j = load(J, J0)
    for t in range(count):
        at = t * W
        keys, queries = load(x.k, key + at), load(x.q, key + at)
        j = fma(splat(s.decay[t]), j, splat(s.beta[t]) * (keys * keys))
        store(s.J, at, j)
        store(s.ratio, at, queries / (j + prior))
        store(s.D, at, splat(s.d_var[t]) * queries)
    for c in range(channels):
        m, lane = load(M, M0 + c * z.N), c * z.chunk
        for t in range(count):
            m = fma(splat(s.decay[t]), m, splat(s.value[lane + t]) * load(x.k, key + t * W))
            store(s.M, (lane + t) * W, m)
            store(s.D, t * W, fma(splat(s.do[lane + t]), m, load(s.D, t * W)))
    dj, d_prior = load(d.J, D0), splat(x.q.dtype.type(0))
    for i in range(count):
        t = count - 1 - i
        at = t * W
        j, keys = load(s.J, at), load(x.k, key + at)
        store(s.cross, at + W, fma(dj, j, load(s.cross, at + W)))
        F, ratio = load(s.D, at) / (j + prior), load(s.ratio, at)
        E = ratio * F
        d_prior = d_prior - E
        dj = dj - E
        store(s.over_b, at, fma(dj, keys * keys, load(s.over_b, at)))
        store(d.q, dkey + at, load(d.q, dkey + at) + fma(splat(s.d_var[t]), ratio, F))
        store(d.k, dkey + at, fma(splat(s.beta[t] + s.beta[t]) * keys, dj, load(d.k, dkey + at)))
        dj = dj * splat(s.decay[t])
    store(s.cross, 0, fma(dj, load(J, J0), load(s.cross, 0)))
    store(d.J, D0, dj)
    for c in range(channels):
        dm, lane = load(d.M, E0 + c * z.N), c * z.chunk
        for i in range(count):
            t = count - 1 - i
            at, here = t * W, (lane + t) * W
            store(s.cross, at + W, fma(dm, load(s.M, here), load(s.cross, at + W)))
            dm = fma(splat(s.do[lane + t]), load(s.ratio, at), dm)
            store(s.over_v, here, fma(dm, load(x.k, key + at), load(s.over_v, here)))
            store(d.k, dkey + at, fma(splat(s.value[lane + t]), dm, load(d.k, dkey + at)))
            dm = dm * splat(s.decay[t])
        store(s.cross, 0, fma(dm, load(M, M0 + c * z.N), load(s.cross, 0)))
        store(d.M, E0 + c * z.N, dm)
    return total(d_prior)
