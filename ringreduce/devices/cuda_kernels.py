"""CUDA source of the kernels: folds, the division of a mean, conversion to and from 16 bits.

The source is compiled when a kernel is first needed, without fused multiply-add.  The results are
then those of the processor:

* sums and products are rounded once, integers wrap;
* subnormal numbers are kept: CuPy compiles with ``-ftz=true``, which replaces them by zero in
  float32, so the source uses instructions that this option leaves alone;
* 16-bit floats are combined in float32 and rounded once, and every NaN of theirs is the format's
  positive quiet NaN;
* min and max give NaN where either operand is NaN, and the right operand where both are equal; of
  16-bit zeros -0 is the lesser one.

The NaN that a sum of 32- or 64-bit floats gives depends on the GPU.
"""

from __future__ import annotations

OPTIONS = ("--std=c++17", "--fmad=false")

C_TYPES = {
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "Half",
    "bfloat16": "Brain",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
"""The type of each dtype in the source."""

SHORT = ("float16", "bfloat16")
_OPERATIONS = {
    "sum": "Sum",
    "mean": "Sum",
    "prod": "Product",
    "min": "Least",
    "max": "Most",
    "and": "And",
    "or": "Or",
    "xor": "Xor",
}
_BITWISE, _ORDERED = ("and", "or", "xor"), ("min", "max")


def fold_name(op: str, dtype: str) -> str:
    """Name the kernel that folds two arrays: ``(left, right, into, count)``."""
    return f"fold<{C_TYPES[dtype]}, {_OPERATIONS[op]}>"


def accumulate_name(op: str, dtype: str) -> str:
    """Name the kernel that folds 16-bit floats into float32: ``(source, total, count)``."""
    return f"accumulate<{C_TYPES[dtype]}, {_OPERATIONS[op]}>"


def divide_name(dtype: str) -> str:
    """Name the kernel that divides an array: ``(array, by, count)``, `by` a double."""
    return f"divide<{C_TYPES[dtype]}>"


def convert_name(source: str, into: str) -> str:
    """Name the kernel that converts to 16 bits or back: ``(source, into, count)``."""
    return f"convert<{C_TYPES[source]}, {C_TYPES[into]}>"


def names_for(dtype: str) -> tuple[str, ...]:
    """Name all kernels of one dtype, which are compiled together."""
    is_float = dtype.startswith(("float", "bfloat"))
    is_complex = dtype.startswith("complex")
    ops = [
        op
        for op in _OPERATIONS
        if not (is_complex and op in _ORDERED) and not ((is_float or is_complex) and op in _BITWISE)
    ]
    names = {fold_name(op, dtype) for op in ops}
    if is_float or is_complex:
        names.add(divide_name(dtype))
    if dtype in SHORT:
        names |= {accumulate_name(op, dtype) for op in ("sum", "prod")}
        for wide in ("float32", "float64"):
            names |= {convert_name(dtype, wide), convert_name(wide, dtype)}
    return tuple(sorted(names))


SOURCE = r"""
typedef unsigned short Bits;
typedef long long Count;

// Arithmetic that keeps subnormal numbers of float32.
template <typename T> __device__ T plus(T a, T b) { return a + b; }
template <typename T> __device__ T minus(T a, T b) { return a - b; }
template <typename T> __device__ T times(T a, T b) { return a * b; }
template <typename T> __device__ T over(T a, T b) { return a / b; }
template <typename T> __device__ bool less(T a, T b) { return a < b; }
#define ON_FLOATS(name, instruction)                                                \
    __device__ float name(float a, float b) {                                       \
        float c;                                                                    \
        asm(instruction " %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));                 \
        return c;                                                                   \
    }
ON_FLOATS(plus, "add.rn.f32")
ON_FLOATS(minus, "sub.rn.f32")
ON_FLOATS(times, "mul.rn.f32")
ON_FLOATS(over, "div.rn.f32")
__device__ bool less(float a, float b) {
    unsigned yes;
    asm("set.lt.u32.f32 %0, %1, %2;" : "=r"(yes) : "f"(a), "f"(b));
    return yes;
}
__device__ double widened(float x) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));
    return wide;
}
__device__ float towards_zero(double x) {
    float cut;
    asm("cvt.rz.f32.f64 %0, %1;" : "=f"(cut) : "d"(x));
    return cut;
}

// Round float64 to odd, as float32: rounded again to 16 bits, it is as if rounded once.
// Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008.
__device__ float to_odd(float x) { return x; }
__device__ float to_odd(double x) {
    float cut = towards_zero(x);
    return widened(cut) == x || x != x ? cut : __uint_as_float(__float_as_uint(cut) | 1);
}

struct Half {
    Bits bits;
    Half() = default;
    __device__ explicit Half(float wide) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
        if (wide != wide) bits = 0x7E00;
    }
    __device__ operator float() const {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
        return wide;
    }
};

struct Brain {
    Bits bits;
    Brain() = default;
    __device__ explicit Brain(float wide) {
        unsigned all = __float_as_uint(wide);
        bits = (all + 0x7FFF + ((all >> 16) & 1)) >> 16;  // to nearest, ties to even
        if (wide != wide) bits = 0x7FC0;
    }
    __device__ operator float() const { return __uint_as_float((unsigned)bits << 16); }
};

template <typename T> struct Complex {
    T real, imag;
    __device__ Complex operator+(Complex b) const {
        return {plus(real, b.real), plus(imag, b.imag)};
    }
    __device__ Complex operator*(Complex b) const {
        return {minus(times(real, b.real), times(imag, b.imag)),
                plus(times(real, b.imag), times(imag, b.real))};
    }
    __device__ Complex operator/(double by) const {
        return {over(real, (T)by), over(imag, (T)by)};
    }
};

// The type that elements are combined in.  Unsigned integers wrap; in C++ signed ones need not.
template <typename T> struct Wide { typedef unsigned type; };
template <> struct Wide<long long> { typedef unsigned long long type; };
template <> struct Wide<unsigned long long> { typedef unsigned long long type; };
template <> struct Wide<Half> { typedef float type; };
template <> struct Wide<Brain> { typedef float type; };
template <> struct Wide<float> { typedef float type; };
template <> struct Wide<double> { typedef double type; };
template <typename T> struct Wide<Complex<T>> { typedef Complex<T> type; };

struct Sum {
    template <typename T> __device__ static T combine(T a, T b) { return plus(a, b); }
};
struct Product {
    template <typename T> __device__ static T combine(T a, T b) { return times(a, b); }
};
template <typename T, typename Op> struct Fold {
    __device__ static T of(T a, T b) {
        typedef typename Wide<T>::type W;
        return (T)Op::template combine<W>((W)a, (W)b);
    }
};

struct And {};
struct Or {};
struct Xor {};
template <typename T> struct Fold<T, And> { __device__ static T of(T a, T b) { return a & b; } };
template <typename T> struct Fold<T, Or> { __device__ static T of(T a, T b) { return a | b; } };
template <typename T> struct Fold<T, Xor> { __device__ static T of(T a, T b) { return a ^ b; } };

template <typename T> __device__ bool is_nan(T x) { return false; }
__device__ bool is_nan(float x) { return x != x; }
__device__ bool is_nan(double x) { return x != x; }
__device__ bool is_nan(Half x) { return is_nan((float)x); }
__device__ bool is_nan(Brain x) { return is_nan((float)x); }

template <typename T> __device__ T quiet(T nan) { return nan; }
__device__ Half quiet(Half nan) { return Half((float)nan); }
__device__ Brain quiet(Brain nan) { return Brain((float)nan); }

// Convert sign and magnitude to an integer of the same order, -0 before 0.
__device__ int key(Bits bits) { return (short)(bits & 0x8000 ? bits ^ 0x7FFF : bits); }
__device__ bool less(Half a, Half b) { return key(a.bits) < key(b.bits); }
__device__ bool less(Brain a, Brain b) { return key(a.bits) < key(b.bits); }

struct Least {};
struct Most {};
template <typename T> struct Fold<T, Least> {
    __device__ static T of(T a, T b) {
        return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : less(a, b) ? a : b;
    }
};
template <typename T> struct Fold<T, Most> {
    __device__ static T of(T a, T b) {
        return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : less(b, a) ? a : b;
    }
};

#define EACH(i, count)                                                              \
    for (Count i = blockIdx.x * (Count)blockDim.x + threadIdx.x; i < count;         \
         i += (Count)gridDim.x * blockDim.x)

// `into` may be either operand, so none of the pointers is declared __restrict__.
template <typename T, typename Op>
__global__ void fold(const T* left, const T* right, T* into, Count count) {
    EACH(i, count) into[i] = Fold<T, Op>::of(left[i], right[i]);
}
template <typename T, typename Op>
__global__ void accumulate(const T* source, float* total, Count count) {
    EACH(i, count) total[i] = Op::template combine<float>(total[i], (float)source[i]);
}
template <typename T> __global__ void divide(T* array, double by, Count count) {
    typedef typename Wide<T>::type W;
    EACH(i, count) array[i] = (T)over((W)array[i], (W)by);
}
template <> __global__ void divide(Complex<float>* array, double by, Count count) {
    EACH(i, count) array[i] = array[i] / by;
}
template <> __global__ void divide(Complex<double>* array, double by, Count count) {
    EACH(i, count) array[i] = array[i] / by;
}

__device__ float quiet_or(float x) { return is_nan(x) ? __uint_as_float(0x7FC00000) : x; }
template <typename To> __device__ To as(float x) { return x; }
template <> __device__ double as(float x) { return widened(x); }
template <typename From, typename To> struct Convert {
    __device__ static To from(From x) { return (To)to_odd(x); }
};
template <typename To> struct Convert<Half, To> {
    __device__ static To from(Half x) { return as<To>(quiet_or((float)x)); }
};
template <typename To> struct Convert<Brain, To> {
    __device__ static To from(Brain x) { return as<To>(quiet_or((float)x)); }
};
template <typename From, typename To>
__global__ void convert(const From* source, To* into, Count count) {
    EACH(i, count) into[i] = Convert<From, To>::from(source[i]);
}
"""
