//! The table of operations that many tests call. A row has the operation's name, its call, its
//! precision, and where it has a slope. Tests with hostile arguments, goldens, gradients and random
//! programs all read this table, so a new row is tested by all of them. Operations whose arguments
//! differ between tests (slices, matrix multiplications, positions) are in those tests.

#![allow(dead_code, reason = "each test binary uses a part")]

use mlx_rs_core::{Array, Axes, Result, fft, linalg};

pub type One = fn(&Array) -> Result<Array>;
pub type Two = fn(&Array, &Array) -> Result<Array>;
pub type Fourier2 = fn(&Array, Option<[i32; 2]>, [i32; 2]) -> Result<Array>;

/// The function of an operation, by the form of its arguments.
#[derive(Clone, Copy)]
pub enum Call {
    One(One),
    Two(Two),
    /// Reduces axes. The `bool` keeps the axes with length one.
    Reduce(for<'a> fn(&Array, Axes<'a>, bool) -> Result<Array>),
    /// Scans along an axis; the flags are reverse and inclusive.
    Scan(fn(&Array, i32, bool, bool) -> Result<Array>),
    /// Needs an axis.
    Axis(fn(&Array, i32) -> Result<Array>),
    /// Needs two integers, one of which is an axis.
    Numbers(fn(&Array, i32, i32) -> Result<Array>),
    /// A Fourier transform with a length and an axis.
    Fourier(fn(&Array, Option<i32>, i32) -> Result<Array>),
    /// A Fourier transform with two lengths and two axes.
    Fourier2(Fourier2),
    /// A Fourier transform with lengths and axes.
    FourierN(for<'a> fn(&Array, Option<&'a [i32]>, Axes<'a>) -> Result<Array>),
    /// A shift of a spectrum along axes.
    Shift(for<'a> fn(&Array, Axes<'a>) -> Result<Array>),
}

/// The reason why results may differ if the same values are in another layout.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rounding {
    /// Results are equal.
    Exact,
    /// The rounding of each element.
    Element,
    /// The order of additions in a sum over elements.
    Sum,
    /// The rounding of a longer algorithm.
    Long,
}

/// The inputs at which a gradient can be compared with finite differences.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Slope {
    /// No inputs: the results are integers or steps, or MLX has no gradient.
    None,
    /// All inputs except corners.
    Everywhere,
    /// Inputs that are positive and not near zero.
    Positive,
}

#[derive(Clone, Copy)]
pub struct Operation {
    pub name: &'static str,
    pub call: Call,
    pub rounding: Rounding,
    pub slope: Slope,
}

/// The operation with this name.
pub fn named(name: &str) -> Option<&'static Operation> {
    OPERATIONS.iter().find(|o| o.name == name)
}

/// The operations of one array, with their functions.
pub fn of_one() -> impl Iterator<Item = (&'static Operation, One)> {
    OPERATIONS.iter().filter_map(|o| match o.call {
        Call::One(f) => Some((o, f)),
        _ => None,
    })
}

/// The operations of two arrays, with their functions.
pub fn of_two() -> impl Iterator<Item = (&'static Operation, Two)> {
    OPERATIONS.iter().filter_map(|o| match o.call {
        Call::Two(f) => Some((o, f)),
        _ => None,
    })
}

macro_rules! table {
    ($($call:ident $name:ident = $f:expr, $rounding:ident $slope:ident;)*) => {
        pub const OPERATIONS: &[Operation] = &[$(Operation {
            name: stringify!($name),
            call: Call::$call($f),
            rounding: Rounding::$rounding,
            slope: Slope::$slope,
        }),*];
    };
}

table! {
    One abs = Array::abs, Element Everywhere;
    One arccos = Array::arccos, Element None;
    One arccosh = Array::arccosh, Element None;
    One arcsin = Array::arcsin, Element None;
    One arcsinh = Array::arcsinh, Element Everywhere;
    One arctan = Array::arctan, Element Everywhere;
    One arctanh = Array::arctanh, Element None;
    One argsort_flat = Array::argsort_flat, Exact None;
    One at_least_1d = Array::at_least_1d, Exact Everywhere;
    One at_least_2d = Array::at_least_2d, Exact Everywhere;
    One at_least_3d = Array::at_least_3d, Exact Everywhere;
    One bitwise_invert = Array::bitwise_invert, Exact None;
    One ceil = Array::ceil, Exact None;
    One conjugate = Array::conjugate, Exact None;
    One contiguous = Array::contiguous, Exact Everywhere;
    One copy = Array::copy, Exact Everywhere;
    One cos = Array::cos, Element Everywhere;
    One cosh = Array::cosh, Element Everywhere;
    One degrees = Array::degrees, Exact Everywhere;
    One erf = Array::erf, Element Everywhere;
    One erfinv = Array::erfinv, Element None;
    One exp = Array::exp, Element Everywhere;
    One expm1 = Array::expm1, Element Everywhere;
    One floor = Array::floor, Exact None;
    One gelu = Array::gelu, Element Everywhere;
    One gelu_tanh = Array::gelu_tanh, Element Everywhere;
    One det = linalg::det, Long None;
    One imag = Array::imag, Exact None;
    One inv = linalg::inv, Long None;
    One is_finite = Array::is_finite, Exact None;
    One is_inf = Array::is_inf, Exact None;
    One is_nan = Array::is_nan, Exact None;
    One is_neg_inf = Array::is_neg_inf, Exact None;
    One is_pos_inf = Array::is_pos_inf, Exact None;
    One log = Array::log, Element Positive;
    One log10 = Array::log10, Element Positive;
    One log1p = Array::log1p, Element Positive;
    One log2 = Array::log2, Element Positive;
    One logical_not = Array::logical_not, Exact None;
    One negative = Array::negative, Exact Everywhere;
    One ones_like = Array::ones_like, Exact None;
    One pinv = linalg::pinv, Long None;
    One radians = Array::radians, Exact Everywhere;
    One real = Array::real, Exact None;
    One reciprocal = Array::reciprocal, Element Positive;
    One rsqrt = Array::rsqrt, Element Positive;
    One sigmoid = Array::sigmoid, Element Everywhere;
    One sign = Array::sign, Exact None;
    One silu = Array::silu, Element Everywhere;
    One sin = Array::sin, Element Everywhere;
    One singular_values = linalg::singular_values, Long None;
    One sinh = Array::sinh, Element Everywhere;
    One sort_flat = Array::sort_flat, Exact Everywhere;
    One sqrt = Array::sqrt, Element Positive;
    One square = Array::square, Element Everywhere;
    One squeeze = Array::squeeze, Exact Everywhere;
    One stop_gradient = Array::stop_gradient, Exact None;
    One tan = Array::tan, Element None;
    One tanh = Array::tanh, Element Everywhere;
    One trunc = Array::trunc, Exact None;
    One to_fp8 = Array::to_fp8, Exact None;
    One transpose = Array::transpose, Exact Everywhere;
    One zeros_like = Array::zeros_like, Exact None;

    Two add = Array::add, Exact Everywhere;
    Two arctan2 = Array::arctan2, Element None;
    Two bitwise_and = Array::bitwise_and, Exact None;
    Two bitwise_or = Array::bitwise_or, Exact None;
    Two bitwise_xor = Array::bitwise_xor, Exact None;
    Two divide = Array::divide, Element Everywhere;
    Two equal = Array::equal, Exact None;
    Two floor_divide = Array::floor_divide, Element None;
    Two greater = Array::greater, Exact None;
    Two greater_equal = Array::greater_equal, Exact None;
    Two inner = Array::inner, Sum Everywhere;
    Two kron = Array::kron, Sum Everywhere;
    Two left_shift = Array::left_shift, Exact None;
    Two less = Array::less, Exact None;
    Two less_equal = Array::less_equal, Exact None;
    Two logaddexp = Array::logaddexp, Element Everywhere;
    Two logical_and = Array::logical_and, Exact None;
    Two logical_or = Array::logical_or, Exact None;
    Two logical_xor = Array::logical_xor, Exact None;
    Two matmul = Array::matmul, Sum Everywhere;
    Two maximum = Array::maximum, Exact Everywhere;
    Two minimum = Array::minimum, Exact Everywhere;
    Two multiply = Array::multiply, Element Everywhere;
    Two not_equal = Array::not_equal, Exact None;
    Two outer = Array::outer, Sum Everywhere;
    Two power = Array::power, Element Positive;
    Two remainder = Array::remainder, Element None;
    Two right_shift = Array::right_shift, Exact None;
    Two solve = linalg::solve, Long None;
    Two subtract = Array::subtract, Exact Everywhere;

    Reduce all = |a, axes, keep| a.all(axes, keep), Exact None;
    Reduce any = |a, axes, keep| a.any(axes, keep), Exact None;
    Reduce logsumexp = |a, axes, keep| a.logsumexp(axes, keep), Sum Everywhere;
    Reduce max = |a, axes, keep| a.max(axes, keep), Exact Everywhere;
    Reduce mean = |a, axes, keep| a.mean(axes, keep), Sum Everywhere;
    Reduce median = |a, axes, keep| a.median(axes, keep), Sum Everywhere;
    Reduce count_nonzero = |a, axes, keep| a.count_nonzero(axes, keep), Exact None;
    Reduce min = |a, axes, keep| a.min(axes, keep), Exact Everywhere;
    Reduce prod = |a, axes, keep| a.prod(axes, keep), Sum Everywhere;
    Reduce softmax = |a, axes, _| a.softmax(axes, true), Sum Everywhere;
    Reduce sum = |a, axes, keep| a.sum(axes, keep), Sum Everywhere;

    Scan cummax = Array::cummax, Exact Everywhere;
    Scan cummin = Array::cummin, Exact Everywhere;
    Scan cumprod = Array::cumprod, Sum Everywhere;
    Scan cumsum = Array::cumsum, Sum Everywhere;
    Scan logcumsumexp = Array::logcumsumexp, Sum Everywhere;

    Axis argsort = Array::argsort, Exact None;
    Axis sort = Array::sort, Exact Everywhere;
    Axis squeeze_axis = Array::squeeze_axis, Exact Everywhere;

    Numbers argpartition = Array::argpartition, Exact None;
    Numbers flatten = Array::flatten, Exact Everywhere;
    Numbers move_axis = Array::move_axis, Exact Everywhere;
    Numbers partition = Array::partition, Exact None;
    Numbers repeat = Array::repeat, Exact Everywhere;
    Numbers swap_axes = Array::swap_axes, Exact Everywhere;
    Numbers topk = Array::topk, Exact Everywhere;

    Fourier fft = fft::fft, Long None;
    Fourier ifft = fft::ifft, Long None;
    Fourier rfft = fft::rfft, Long None;
    Fourier irfft = fft::irfft, Long None;
    Fourier2 fft2 = fft::fft2, Long None;
    Fourier2 ifft2 = fft::ifft2, Long None;
    Fourier2 rfft2 = fft::rfft2, Long None;
    Fourier2 irfft2 = fft::irfft2, Long None;
    FourierN fftn = |a, n, axes| fft::fftn(a, n, axes), Long None;
    FourierN ifftn = |a, n, axes| fft::ifftn(a, n, axes), Long None;
    FourierN rfftn = |a, n, axes| fft::rfftn(a, n, axes), Long None;
    FourierN irfftn = |a, n, axes| fft::irfftn(a, n, axes), Long None;
    Shift fftshift = |a, axes| fft::fftshift(a, axes), Exact None;
    Shift ifftshift = |a, axes| fft::ifftshift(a, axes), Exact None;
}
