//! Convolutions of channels-last arrays: `[N, .., C]` with weights `[C_out, .., C_in / groups]`, in
//! one to three spatial axes. Every size is computed here first, in wide arithmetic: MLX divides by
//! strides and groups and adds paddings without looking.
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

use crate::array::Array;
use crate::call;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// How a convolution moves. Lists have one entry per spatial axis, one entry for all of them, or none
/// for the default.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Conv {
    /// Steps between outputs; 1 unless given.
    pub stride: Vec<i32>,
    /// Zeros before and behind each spatial axis; 0 unless given.
    pub padding: Vec<i32>,
    /// Steps between the taps of the kernel; 1 unless given.
    pub dilation: Vec<i32>,
    /// Steps between inputs, with zeros between them; 1 unless given. Not for transposed ones, whose
    /// stride it is.
    pub input_dilation: Vec<i32>,
    /// More places at the end of each axis of a transposed convolution; 0 unless given.
    pub output_padding: Vec<i32>,
    /// Groups that channels are cut into, convolved apart; 0 and 1 are one group.
    pub groups: i32,
    /// Whether kernels are flipped, as mathematicians do.
    pub flip: bool,
}

/// The lists of a [`Conv`], one entry per spatial axis, in range.
struct Plan {
    stride: Vec<i32>,
    low: Vec<i32>,
    high: Vec<i32>,
    dilation: Vec<i32>,
    input_dilation: Vec<i32>,
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
                format!("{} values of {name} for {axes} spatial axes", many.len()),
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
    /// Checks everything against `x` and `w`, and the size of the result.
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
        let mut plan = Plan {
            low: padding.clone(),
            high: padding.clone(),
            stride: stride.clone(),
            dilation: dilation.clone(),
            input_dilation: inputs.clone(),
            groups,
        };
        let mut out = vec![xs[0]];
        for i in 0..axes {
            let (n, k) = (i64::from(xs[i + 1]), i64::from(ws[i + 1]));
            let kernel = 1 + i64::from(dilation[i]) * (k - 1);
            let steps = if transposed { stride[i] } else { inputs[i] };
            let dilated = 1 + i64::from(steps) * (n - 1);
            let pad = i64::from(padding[i]);
            // A transposed convolution is a plain one of the dilated input with what is missing of
            // the kernel as padding; padding beyond that cuts the input.
            let (low, high, step) = if transposed {
                (kernel - pad - 1, kernel - pad - 1 + i64::from(extra[i]), 1)
            } else {
                (pad, pad, i64::from(stride[i]))
            };
            let room = dilated + low + high;
            let length = (room - kernel) / step + 1;
            let countable = |v: i64| v.unsigned_abs() < (1 << 30);
            let cut = low.min(0) + high.min(0) + n;
            if room < kernel || !(countable(room) && countable(kernel) && countable(dilated)) {
                let why = format!(
                    "along spatial axis {i} a kernel that spans {kernel} does not fit {room} places"
                );
                return Err(bad(op, ErrorKind::Shape, why, x, w));
            }
            if cut <= 0 || (transposed && (low < 0 || high < 0) && steps > 1) {
                let why =
                    format!("padding {pad} along spatial axis {i} is more than the kernel has");
                return Err(bad(op, ErrorKind::Value, why, x, w));
            }
            // All below 2^30 by the check above.
            plan.low[i] = low as i32;
            plan.high[i] = high as i32;
            if transposed {
                plan.input_dilation[i] = stride[i];
                plan.stride[i] = 1;
            }
            out.push(length as i32);
        }
        out.push(ws[0]);
        // The padded input and the unfolded patches are made besides the result.
        let patch: i64 = ws[1..].iter().map(|&d| i64::from(d)).product();
        let bytes = memory::checked_bytes(&out, x.dtype().size())
            .and_then(|b| b.checked_mul(u64::try_from(patch).ok()?))
            .map(|b| b / u64::from(ws[0].unsigned_abs().max(1)));
        if bytes.is_none_or(|b| b > memory::budget()) {
            let why = format!("a result of shape {out:?} and its patches exceed the memory budget");
            return Err(bad(op, ErrorKind::OutOfMemory, why, x, w));
        }
        Ok(plan)
    }
}

impl Array {
    /// Convolution (the cross-correlation of machine learning, unless `conv.flip`) of `[N, spatial ..,
    /// C_in]` with `weight` `[C_out, spatial .., C_in / groups]`, giving `[N, spatial .., C_out]`.
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
    /// [`ErrorKind::Shape`] when arrays, lists or groups do not fit each other; [`ErrorKind::Value`] for
    /// strides and dilations below one or negative padding; [`ErrorKind::OutOfMemory`] beyond the
    /// budget; MLX's message for types that are no floats.
    pub fn conv(&self, weight: &Array, conv: &Conv) -> Result<Array> {
        let op = "conv";
        let plan = conv.plan(op, self, weight, false)?;
        self.conv_raw(op, weight, &plan, conv.flip)
    }

    /// Transposed convolution: the gradient of [`Array::conv`] with respect to its input, which spreads
    /// each input over the kernel. `[N, spatial .., C_in]` with `weight` `[C_out, spatial .., C_in /
    /// groups]` gives axes of `(n - 1) * stride - 2 * padding + dilation * (k - 1) + 1 +
    /// output_padding`.
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
    pub fn conv_transpose(&self, weight: &Array, conv: &Conv) -> Result<Array> {
        let op = "conv_transpose";
        let plan = conv.plan(op, self, weight, true)?;
        self.conv_raw(op, weight, &plan, !conv.flip)
    }

    fn conv_raw(&self, op: &'static str, weight: &Array, plan: &Plan, flip: bool) -> Result<Array> {
        let n = plan.stride.len();
        call::array(op, |out, s| {
            // SAFETY: every pointer is to a list of `n` entries, one per spatial axis, and the plan
            // has checked them against both arrays.
            unsafe {
                sys::mlx_conv_general(
                    out,
                    self.raw(),
                    weight.raw(),
                    plan.stride.as_ptr(),
                    n,
                    plan.low.as_ptr(),
                    n,
                    plan.high.as_ptr(),
                    n,
                    plan.dilation.as_ptr(),
                    n,
                    plan.input_dilation.as_ptr(),
                    n,
                    plan.groups,
                    flip,
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self, weight]))
    }
}
