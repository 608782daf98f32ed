//! Convolutions of channels-last arrays: `[N, .., C]` with weights `[C_out, .., C_in / groups]`, in
//! one to three spatial axes. This module first computes every size in 64 bits, because MLX divides
//! by strides and groups and adds paddings without checks. MLX's CPU kernels or gradients compute
//! some geometries wrongly. Those are computed in an equivalent form: with explicit zeros around
//! the input, or as a part of a larger result.
//!
//! ```
//! use mlx_rs_core::{Array, Conv};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 4, 1])?;
//! let w = Array::from_slice(&[1.0f32, 1.0], &[1, 2, 1])?;
//! assert_eq!(x.conv(&w, &Conv::default())?.to_vec::<f32>()?, [3.0, 5.0, 7.0]);
//! let strided = Conv { stride: vec![2], ..Conv::default() };
//! assert_eq!(x.conv(&w, &strided)?.to_vec::<f32>()?, [3.0, 7.0]);
//! # Ok(()) }
//! ```

use mlx_sys as sys;

use super::Pad;
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::{mapped, memory};

/// The geometry of a convolution. Each list has one entry per spatial axis, a single entry for all
/// axes, or none for the default.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Conv {
    /// The distance between the input positions of adjacent outputs; 1 by default.
    pub stride: Vec<i32>,
    /// The number of zeros before and after each spatial axis; 0 by default.
    pub padding: Vec<i32>,
    /// The distance between adjacent kernel elements; 1 by default.
    pub dilation: Vec<i32>,
    /// The distance between adjacent inputs, with zeros between them; 1 by default. Transposed
    /// convolutions ignore it, because their stride has this effect.
    pub input_dilation: Vec<i32>,
    /// The number of additional outputs at the end of each axis of a transposed convolution; 0 by
    /// default.
    pub output_padding: Vec<i32>,
    /// The number of groups of channels. Each group is convolved separately. 0 and 1 mean one
    /// group.
    pub groups: i32,
    /// Whether kernels are flipped, as in the mathematical definition.
    pub flip: bool,
}

/// One spatial axis: `result[o] += input[i] * kernel[t]` where
/// `stride * o + dilation * t == input_dilation * i + low`.
#[derive(Debug, Clone, Copy)]
struct Axis {
    /// The number of input elements.
    length: i64,
    /// The number of kernel elements.
    taps: i64,
    stride: i64,
    dilation: i64,
    input_dilation: i64,
    /// The number of zeros before the dilated input. A negative number truncates the input.
    low: i64,
    /// The number of zeros after the dilated input. A negative number truncates the input.
    high: i64,
    /// The number of output elements.
    out: i64,
}

/// How an [`Axis`] is computed: the preparation of the input, the convolution, and the part of its
/// output that is the result.
#[derive(Debug, Clone, Copy)]
struct Lowered {
    /// The dilation that is applied to the input first.
    stuff: i64,
    /// The numbers of zeros around the input. Negative numbers truncate the input.
    around: (i64, i64),
    /// The convolution that MLX computes.
    axis: Axis,
    /// The first element of the convolution's output that belongs to the result.
    from: i64,
}

impl Axis {
    /// The number of elements that the kernel spans.
    fn span(&self) -> i64 {
        1 + self.dilation * (self.taps - 1)
    }

    /// The number of elements of the dilated input.
    fn dilated(&self) -> i64 {
        1 + self.input_dilation * (self.length - 1)
    }

    fn with_out(self) -> Self {
        let places = self.dilated() + self.low + self.high - self.span();
        Self {
            out: places.div_euclid(self.stride) + 1,
            ..self
        }
    }

    /// Whether MLX computes this axis and the axes of all gradients correctly. The gradients are
    /// also convolutions of the same three arrays, in other roles. MLX has three faults there:
    ///
    /// * The CPU kernel computes and writes `low / stride` results without a bounds check.
    /// * A negative padding truncates a dilated input too much. A gradient with respect to the
    ///   input is truncated twice.
    /// * That gradient assumes that the two paddings are equal.
    ///
    /// `plain` means that the derivative with respect to the kernel is a matrix product.
    fn is_sound(&self, plain: bool) -> bool {
        let span = self.span();
        // The plain convolution that maps the longer array to the shorter one. This axis is that
        // convolution or its transpose.
        let (length, stride, pad, out) = if self.input_dilation == 1 {
            (self.length, self.stride, self.low, self.out)
        } else {
            (
                self.out,
                self.input_dilation,
                span - 1 - self.low,
                self.length,
            )
        };
        let rest = length + 2 * pad - span - stride * (out - 1);
        self.low == self.high
            && (self.input_dilation == 1 || self.stride == 1)
            && (0..span).contains(&pad)
            && length >= span
            && (pad == 0 || (stride * (out - 1) >= pad && (plain || rest == 0)))
    }

    /// An equivalent computation that MLX performs correctly.
    fn lower(self, plain: bool) -> Lowered {
        let unchanged = Lowered {
            stuff: 1,
            around: (0, 0),
            axis: self,
            from: 0,
        };
        if self.is_sound(plain) {
            return unchanged;
        }
        if self.input_dilation > 1 && self.stride == 1 {
            // Computes every output to which an input contributes. The result is a slice of these
            // outputs. Zeros are added around the input if the result also needs other outputs.
            let reach = self.span() - 1;
            let step = self.input_dilation;
            let missing = |pad: i64| ((pad - reach).max(0) + step - 1) / step;
            let around = (missing(self.low), missing(self.high));
            let axis = Axis {
                length: self.length + around.0 + around.1,
                low: reach,
                high: reach,
                ..self
            };
            return Lowered {
                around,
                axis: axis.with_out(),
                from: reach - self.low + step * around.0,
                ..unchanged
            };
        }
        let axis = Axis {
            length: self.dilated() + self.low + self.high,
            input_dilation: 1,
            low: 0,
            high: 0,
            ..self
        };
        Lowered {
            stuff: self.input_dilation,
            around: (self.low, self.high),
            axis,
            ..unchanged
        }
    }
}

/// A [`Conv`] of two arrays: all sizes are positive and below 2^30.
struct Plan {
    axes: Vec<Lowered>,
    /// The number of output elements along each spatial axis.
    out: Vec<i64>,
    groups: i32,
}

fn bad(op: &'static str, kind: ErrorKind, why: String, x: &Array, w: &Array) -> Error {
    Error::new(kind, op, why).with_inputs(&[x, w])
}

fn spread(
    op: &'static str,
    name: &str,
    list: &[i32],
    axes: usize,
    default: i32,
) -> Result<Vec<i32>> {
    let spread = match list {
        [] => vec![default; axes],
        [one] => vec![*one; axes],
        many if many.len() == axes => many.to_vec(),
        many => {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!(
                    "{} values of {name} were given for {axes} spatial axes; give none, one, or one for each",
                    many.len()
                ),
            ));
        }
    };
    if spread.iter().any(|&v| v < default) {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            format!("{name} {spread:?} must be at least {default}"),
        ));
    }
    Ok(spread)
}

impl Conv {
    /// Checks the geometry against `x` and `w`, and the size of the result.
    fn plan(&self, op: &'static str, x: &Array, w: &Array, transposed: bool) -> Result<Plan> {
        let (xs, ws) = (x.shape(), w.shape());
        if !(3..=5).contains(&xs.len()) || ws.len() != xs.len() {
            let why = String::from("needs [N, spatial .., C] and [C_out, spatial .., C_in]");
            return Err(bad(op, ErrorKind::Shape, why, x, w));
        }
        let axes = xs.len() - 2;
        let groups = self.groups.max(1);
        let (channels, taken) = (i64::from(xs[axes + 1]), i64::from(ws[axes + 1]));
        if channels != taken * i64::from(groups) || ws[0] % groups != 0 || self.groups < 0 {
            let why = format!(
                "{channels} channels in {} groups do not fit weights for {taken} and {} outputs",
                self.groups, ws[0]
            );
            return Err(bad(op, ErrorKind::Shape, why, x, w));
        }
        if groups > 1 && axes > 2 {
            let why = String::from("groups are for one and two spatial axes");
            return Err(bad(op, ErrorKind::Unsupported, why, x, w));
        }
        if xs.contains(&0) || ws.contains(&0) {
            let why = String::from("an empty array cannot be convolved");
            return Err(bad(op, ErrorKind::Shape, why, x, w));
        }
        let stride = spread(op, "stride", &self.stride, axes, 1)?;
        let padding = spread(op, "padding", &self.padding, axes, 0)?;
        let dilation = spread(op, "dilation", &self.dilation, axes, 1)?;
        let inputs = spread(op, "input dilation", &self.input_dilation, axes, 1)?;
        let extra = spread(op, "output padding", &self.output_padding, axes, 0)?;
        if transposed && inputs.iter().any(|&d| d != 1) {
            let why = String::from("the stride of a transposed convolution dilates its input");
            return Err(bad(op, ErrorKind::Value, why, x, w));
        }
        if !transposed && extra.iter().any(|&d| d != 0) {
            let why = String::from("only transposed convolutions have output padding");
            return Err(bad(op, ErrorKind::Value, why, x, w));
        }
        let flips = self.flip != transposed;
        let plain =
            !flips && groups == 1 && dilation.iter().chain(&inputs).all(|&d| d == 1) && !transposed;
        let mut plan = Plan {
            axes: Vec::with_capacity(axes),
            out: Vec::with_capacity(axes),
            groups,
        };
        for i in 0..axes {
            let pad = i64::from(padding[i]);
            let mut axis = Axis {
                length: i64::from(xs[i + 1]),
                taps: i64::from(ws[i + 1]),
                stride: i64::from(stride[i]),
                dilation: i64::from(dilation[i]),
                input_dilation: i64::from(inputs[i]),
                low: pad,
                high: pad,
                out: 0,
            };
            if transposed {
                // A transposed convolution is a plain convolution of the dilated input, with the
                // padding `span - 1 - padding`.
                (axis.stride, axis.input_dilation) = (1, axis.stride);
                axis.low = axis.span() - 1 - pad;
                axis.high = axis.low + i64::from(extra[i]);
            }
            let countable = |v: i64| v.unsigned_abs() < (1 << 30);
            let span = axis.span();
            // The two paddings are below 2^62, so their sum does not overflow.
            let room = axis
                .dilated()
                .saturating_add(axis.low.saturating_add(axis.high));
            if room < span || ![room, span, axis.dilated()].into_iter().all(countable) {
                let why = format!(
                    "along spatial axis {i} a kernel that spans {span} does not fit {room} places"
                );
                return Err(bad(op, ErrorKind::Shape, why, x, w));
            }
            let axis = axis.with_out();
            let lowered = axis.lower(plain);
            if !countable(lowered.axis.out) || !countable(lowered.axis.dilated()) {
                let why = format!("spatial axis {i} is too long to be computed");
                return Err(bad(op, ErrorKind::Shape, why, x, w));
            }
            plan.axes.push(lowered);
            plan.out.push(axis.out);
        }
        plan.check_memory(op, x, w)?;
        Ok(plan)
    }
}

impl Plan {
    /// Checks that the padded input and the unfolded patches also fit the budget.
    fn check_memory(&self, op: &'static str, x: &Array, w: &Array) -> Result<()> {
        let wide = |d: &i32| i64::from(*d);
        let bytes = |first: i64, spatial: &mut dyn Iterator<Item = i64>, last: i64| {
            let size = x.dtype().size().max(w.dtype().size()) as u64;
            [first, last]
                .into_iter()
                .chain(spatial)
                .try_fold(size, |p, d| p.checked_mul(u64::try_from(d).ok()?))
        };
        let (xs, ws) = (x.shape(), w.shape());
        let patch: Option<i64> = ws[1..].iter().map(wide).try_fold(1, i64::checked_mul);
        let patches =
            patch.and_then(|p| bytes(wide(&xs[0]), &mut self.axes.iter().map(|a| a.axis.out), p));
        let result = bytes(
            wide(&xs[0]),
            &mut self.axes.iter().map(|a| a.axis.out),
            wide(&ws[0]),
        );
        let padded = bytes(
            wide(&xs[0]),
            &mut self.axes.iter().map(|a| a.axis.length),
            wide(&xs[xs.len() - 1]),
        );
        if [patches, result, padded]
            .iter()
            .all(|bytes| bytes.is_some_and(|b| b <= memory::budget()))
        {
            return Ok(());
        }
        let why = format!(
            "a result with spatial axes {:?} and its patches exceed the memory budget",
            self.out
        );
        Err(bad(op, ErrorKind::OutOfMemory, why, x, w))
    }

    /// The input passed to MLX.
    fn input(&self, x: &Array) -> Result<Array> {
        let mut x = x.clone();
        for (at, lowered) in (1i32..).zip(&self.axes) {
            if lowered.stuff > 1 {
                let length = x.shape()[at as usize];
                let step = lowered.stuff as i32;
                x = x
                    .expand_dims(at + 1)?
                    .pad(&[at + 1], &[0], &[step - 1], Pad::Zero)?
                    .flatten(at, at + 1)?
                    .slice_axis(at, 0, 1 + step * (length - 1))?;
            }
            // Truncation comes last, so it may exceed the size of the original input.
            let (low, high) = (lowered.around.0 as i32, lowered.around.1 as i32);
            if low > 0 || high > 0 {
                x = x.pad(&[at], &[low.max(0)], &[high.max(0)], Pad::Zero)?;
            }
            if low < 0 || high < 0 {
                let length = x.shape()[at as usize];
                x = x.slice_axis(at, -low.min(0), length + high.min(0))?;
            }
        }
        Ok(x)
    }

    /// The part of MLX's output that is the result.
    fn part(&self, y: Array) -> Result<Array> {
        let (mut start, mut stop) = (vec![0; y.ndim()], y.shape().to_vec());
        for (i, (lowered, &out)) in self.axes.iter().zip(&self.out).enumerate() {
            start[i + 1] = lowered.from as i32;
            stop[i + 1] = (lowered.from + out) as i32;
        }
        if stop == y.shape() && start.iter().all(|&s| s == 0) {
            return Ok(y);
        }
        let strides = vec![1; y.ndim()];
        y.slice(&start, &stop, &strides)
    }
}

impl Array {
    /// Convolution of `[N, spatial .., C_in]` with `weight` `[C_out, spatial .., C_in / groups]`.
    /// The result is `[N, spatial .., C_out]`. Unless `conv.flip`, it is the cross-correlation that
    /// machine learning calls convolution.
    ///
    /// ```
    /// use mlx_rs_core::{Conv, array};
    /// let x = array!([1.0, 2.0, 3.0, 4.0])?.reshape(&[1, 4, 1])?;
    /// let w = array!([1.0, 1.0])?.reshape(&[1, 2, 1])?;
    /// let same = Conv { padding: vec![1], ..Conv::default() };
    /// assert_eq!(x.conv(&w, &same)?.to_vec::<f32>()?, [1.0, 3.0, 5.0, 7.0, 4.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when arrays, lists or groups do not match; [`ErrorKind::Value`] for
    /// strides and dilations below one or negative padding; [`ErrorKind::OutOfMemory`] beyond the
    /// budget; MLX's message for types that are not floats. `float64` is computed in `float32`.
    ///
    /// For mixed second derivatives, differentiate with respect to the input first. For a
    /// convolution without dilation, groups and flip, MLX cannot differentiate the kernel's
    /// derivative with respect to the input. The result is wrong, or an error says that shapes do
    /// not broadcast.
    #[doc(alias = "mlx_conv_general")]
    pub fn conv(&self, weight: &Array, conv: &Conv) -> Result<Array> {
        let op = "conv";
        let plan = conv.plan(op, self, weight, false)?;
        self.conv_raw(op, weight, &plan, conv.flip)
    }

    /// Transposed convolution: the gradient of [`Array::conv`] with respect to its input. It
    /// spreads each input over the kernel. The arrays are `[N, spatial .., C_in]` and `weight`
    /// `[C_out, spatial .., C_in / groups]`. Each spatial axis of the result has the length
    /// `(n - 1) * stride - 2 * padding + dilation * (k - 1) + 1 + output_padding`.
    ///
    /// ```
    /// use mlx_rs_core::{Conv, array};
    /// let x = array!([1.0, 2.0])?.reshape(&[1, 2, 1])?;
    /// let w = array!([1.0, 10.0])?.reshape(&[1, 2, 1])?;
    /// let twice = Conv { stride: vec![2], ..Conv::default() };
    /// assert_eq!(x.conv_transpose(&w, &twice)?.to_vec::<f32>()?, [1.0, 10.0, 2.0, 20.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::conv`].
    #[doc(alias = "mlx_conv_general")]
    pub fn conv_transpose(&self, weight: &Array, conv: &Conv) -> Result<Array> {
        let op = "conv_transpose";
        let plan = conv.plan(op, self, weight, true)?;
        self.conv_raw(op, weight, &plan, !conv.flip)
    }

    /// Reverses the spatial axes of a kernel.
    fn reversed(&self) -> Result<Array> {
        let (mut start, mut stop) = (vec![0; self.ndim()], self.shape().to_vec());
        let mut strides = vec![1; self.ndim()];
        for axis in 1..self.ndim() - 1 {
            (start[axis], stop[axis], strides[axis]) = (i32::MAX, i32::MIN, -1);
        }
        self.slice(&start, &stop, &strides)
    }

    fn conv_raw(&self, op: &'static str, weight: &Array, plan: &Plan, flip: bool) -> Result<Array> {
        if self.dtype() == Dtype::Float64 || weight.dtype() == Dtype::Float64 {
            // For `float64`, MLX multiplies in single precision or refuses, depending on the
            // geometry.
            let (x, w) = (self.astype(Dtype::Float32)?, weight.astype(Dtype::Float32)?);
            return x.conv_raw(op, &w, plan, flip)?.astype(Dtype::Float64);
        }
        let mut x = plan.input(self)?;
        if plan.groups > 1 && mapped::inside() {
            // If only the kernels have a batch (`vmap`), MLX assigns their channels to wrong
            // groups. So the input gets the batch as well.
            let one = weight.flatten(0, -1)?.slice_axis(0, 0, 1)?.reshape(&[])?;
            x = super::mapped::with_batch_of(&x, &one.astype(x.dtype())?)?;
        }
        // MLX reverses a gradient along an axis of one element. The derivative of this reversal is
        // then wrongly zero.
        let flat = |a: &&Lowered| a.axis.taps == 1;
        let (flip, weight) = match plan.axes.iter().find(flat) {
            Some(_) if flip => (false, &weight.reversed()?),
            _ => (flip, weight),
        };
        // The plan has checked that all values are below 2^30.
        let list = |of: fn(&Axis) -> i64| -> Vec<i32> {
            plan.axes.iter().map(|a| of(&a.axis) as i32).collect()
        };
        let (stride, dilation) = (list(|a| a.stride), list(|a| a.dilation));
        let (low, high) = (list(|a| a.low), list(|a| a.high));
        let inputs = list(|a| a.input_dilation);
        let n = stride.len();
        call::array(op, |out, s| {
            // SAFETY: every pointer is to a list of `n` entries, one per spatial axis. The plan has
            // checked them against both arrays, and `Axis::is_sound` is true for each.
            unsafe {
                sys::mlx_conv_general(
                    out,
                    x.raw(),
                    weight.raw(),
                    stride.as_ptr(),
                    n,
                    low.as_ptr(),
                    n,
                    high.as_ptr(),
                    n,
                    dilation.as_ptr(),
                    n,
                    inputs.as_ptr(),
                    n,
                    plan.groups,
                    flip,
                    s,
                )
            }
        })
        .and_then(|y| plan.part(y))
        .map_err(|e| e.with_inputs(&[self, weight]))
    }
}
