//! Runs the steps of random programs.

use mlx_rs_core::fast::{self, Mask, RopeBase};
use mlx_rs_core::linalg::Triangle;
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{
    All, Array, Axes, Conv, Dtype, Error, ErrorKind, Pad, QuantMode, Quantized, Result,
    ScatterMode, concatenate, einsum, linalg, stack, where_,
};

use crate::table::{self, Call};

/// One operation: its name, the indices of its argument values, and its numeric arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub name: &'static str,
    pub args: Vec<usize>,
    pub p: Vec<Vec<i32>>,
    pub dtype: Dtype,
}

fn one(result: Result<Array>) -> Result<Vec<Array>> {
    result.map(|a| vec![a])
}

fn conv_of(p: &[Vec<i32>]) -> Conv {
    Conv {
        stride: p[0].clone(),
        padding: p[1].clone(),
        dilation: p[2].clone(),
        input_dilation: p[3].clone(),
        output_padding: p[4].clone(),
        groups: p[5][0],
        flip: p[5][1] != 0,
    }
}

fn quantized(step: &Step, weight: &Array) -> Result<Quantized> {
    Quantized::quantize(weight, step.p[0][0], step.p[0][1], QuantMode::Affine)
}

/// A symmetric matrix with a dominant diagonal, made from any square matrix.
fn definite(a: &Array) -> Result<Array> {
    let n = a.dim(-1)?;
    let unit = mlx_rs_core::identity(n, a.dtype())?;
    let many = Array::scalar(4.0f32)?.astype(a.dtype())?;
    let product = a.matmul(&a.swap_axes(-1, -2)?)?;
    product.add(&unit.multiply(&many)?)
}

/// Whether the operation needs a definite matrix. The step then makes one from its first argument.
fn definite_first(name: &str) -> bool {
    ["inv", "solve"].contains(&name)
}

/// Runs a step on its arguments.
#[allow(clippy::too_many_lines)] // one line or two for each operation
pub fn apply(step: &Step, args: &[Array]) -> Result<Vec<Array>> {
    let (p, x) = (&step.p, &args[0]);
    let axis = || p[0][0];
    let y = || &args[1];
    // Complex values with NaN have no defined order.
    let ordered = [
        "sort",
        "argsort",
        "partition",
        "argpartition",
        "topk",
        "median",
        "max",
        "min",
        "argmax",
        "argmin",
        "cummax",
        "cummin",
        "sort_flat",
        "argsort_flat",
        "maximum",
        "minimum",
    ];
    if x.dtype() == Dtype::Complex64 && ordered.contains(&step.name) {
        let why = "complex numbers in order";
        return Err(Error::new(ErrorKind::Unsupported, "programs", why));
    }
    match table::named(step.name).map(|o| o.call) {
        Some(Call::One(f)) if !definite_first(step.name) => return one(f(x)),
        // The result of a shift beyond the width is undefined, so the count is limited.
        Some(Call::Two(f)) if step.name.ends_with("_shift") => {
            let seven = Array::scalar(7i32)?.astype(y().dtype())?;
            return one(f(x, &y().bitwise_and(&seven)?));
        }
        Some(Call::Two(f)) if !definite_first(step.name) => return one(f(x, y())),
        Some(Call::Scan(f)) => return one(f(x, axis(), p[0][1] != 0, p[0][2] != 0)),
        Some(Call::Axis(f)) => return one(f(x, axis())),
        // An empty list of axes means all axes.
        Some(Call::Reduce(f)) => {
            let axes = if p[0].is_empty() {
                Axes::All
            } else {
                Axes::Many(&p[0])
            };
            return one(f(x, axes, p[1][0] != 0));
        }
        Some(Call::Fourier(f)) => return one(f(x, None, axis())),
        Some(Call::FourierN(f)) => return one(f(x, None, Axes::Many(&p[0]))),
        Some(Call::Shift(f)) => return one(f(x, Axes::Many(&p[0]))),
        // Each of these operations has its numbers in another order.
        _ => {}
    }
    match step.name {
        "transpose_axes" => one(x.transpose_axes(&p[0])),
        "slice" => one(x.slice(&p[0], &p[1], &p[2])),
        "slice_axis" => one(x.slice_axis(axis(), p[0][1], p[0][2])),
        "broadcast_to" => one(x.broadcast_to(&p[0])),
        "expand_dims" => one(x.expand_dims(axis())),
        "reshape" => one(x.reshape(&p[0])),
        "flatten" => one(x.flatten(p[0][0], p[0][1])),
        "split" => x.split(p[0][1], axis()),
        "split_at" => x.split_at(&p[1], axis()),
        "as_strided" => {
            let strides: Vec<i64> = p[1].iter().map(|&s| i64::from(s)).collect();
            one(x.as_strided(&p[0], &strides, p[2][0] as usize))
        }
        "swap_axes" => one(x.swap_axes(p[0][0], p[0][1])),
        "move_axis" => one(x.move_axis(p[0][0], p[0][1])),
        "diagonal" => one(x.diagonal(p[0][0], p[0][1], p[0][2])),
        "unflatten" => one(x.unflatten(axis(), &p[1])),
        "view" => one(x.view(step.dtype)),
        "round" => one(x.round(1)),
        "nan_to_num" => one(x.nan_to_num(1.0, Some(2.0), None)),
        "is_close" => one(x.is_close(y(), 1e-3, 1e-3, true)),
        "divmod" => x.divmod(y()).map(|(q, r)| vec![q, r]),
        "var" | "std" => {
            let axes = if p[0].is_empty() {
                (0..x.ndim() as i32).collect()
            } else {
                p[0].clone()
            };
            let keep = p[1][0] != 0;
            one(if step.name == "var" {
                x.var(&axes[..], keep, 0)
            } else {
                x.std(&axes[..], keep, 0)
            })
        }
        "norm" => one(match &p[0][..] {
            [] => x.square()?.sum(All, p[1][0] != 0)?.sqrt(),
            axes => x.square()?.sum(axes, p[1][0] != 0)?.sqrt(),
        }),
        "argmax" => one(x.argmax(axis(), p[0][1] != 0)),
        "argmin" => one(x.argmin(axis(), p[0][1] != 0)),
        // The result is sorted, because MLX does not define the order on either side of the
        // partition.
        "partition" => one(x.partition(p[0][1], axis())?.sort(axis())),
        "argpartition" => {
            let order = x.argpartition(p[0][1], axis())?;
            one(x.take_along_axis(&order, axis())?.sort(axis()))
        }
        "topk" => one(x.topk(p[0][1], axis())?.sort(axis())),
        "roll" => one(x.roll(p[0][1], axis())),
        "repeat" => one(x.repeat(p[0][1], axis())),
        "where" => one(where_(x, y(), &args[2])),
        "clip" => one(x.clip(Some(y()), Some(&args[2]))),
        "astype" => one(x.astype(step.dtype)),
        "take" => one(x.take(y(), axis())),
        "take_clamped" => one(x.take_clamped(y(), axis())),
        "take_along_axis" => one(x.take_along_axis(y(), axis())),
        "put_along_axis" => one(x.put_along_axis(y(), &args[2], axis())),
        "gather" => one(x.gather(&args[1..].iter().collect::<Vec<_>>(), &p[0], &p[1])),
        "scatter" => {
            let (updates, indices) = (&args[args.len() - 1], &args[1..args.len() - 1]);
            let mode = [
                ScatterMode::Replace,
                ScatterMode::Add,
                ScatterMode::Max,
                ScatterMode::Min,
            ];
            let mode = mode[p[1][0] as usize];
            one(x.scatter(&indices.iter().collect::<Vec<_>>(), updates, &p[0], mode))
        }
        "slice_update" => one(x.slice_update(y(), &p[0], &p[1], &p[2])),
        "slice_at" => one(x.slice_at(y(), &p[0], &p[1])),
        "slice_update_at" => one(x.slice_update_at(&args[2], y(), &p[0])),
        "masked_scatter" => one(x.masked_scatter(y(), &args[2])),
        "scatter_add_axis" => one(x.scatter_add_axis(y(), &args[2], axis())),
        "concatenate" => one(concatenate(&args.iter().collect::<Vec<_>>(), axis())),
        "stack" => one(stack(&args.iter().collect::<Vec<_>>(), axis())),
        "pad" => {
            let mode = if p[3][0] == 0 { Pad::Zero } else { Pad::Edge };
            one(x.pad(&p[0], &p[1], &p[2], mode))
        }
        "tile" => one(x.tile(&p[0])),
        "addmm" => one(x.addmm(y(), &args[2], 0.5, 2.0)),
        "tensordot" => one(x.tensordot_axes(y(), &p[0], &p[1])),
        "einsum" => {
            let text = [
                "ij,jk->ik",
                "ij,kj->ki",
                "bij,bjk->bik",
                "ij,ij->j",
                "ii,ij->j",
                "bij,kj->bki",
            ];
            one(einsum(text[p[0][0] as usize], &[x, y()]))
        }
        "tril" => one(x.tril(axis())),
        "triu" => one(x.triu(axis())),
        "conv" => one(x.conv(y(), &conv_of(p))),
        "conv_transpose" => one(x.conv_transpose(y(), &conv_of(p))),
        // The signs of the factors are arbitrary, so their product is compared.
        "qr" => linalg::qr(x).and_then(|(q, r)| one(q.matmul(&r))),
        "inv" => one(linalg::inv(&definite(x)?)),
        "solve" => one(linalg::solve(&definite(x)?, y())),
        "cholesky" => one(linalg::cholesky(&definite(x)?, p[0][0] != 0)),
        "eigvalsh" => one(linalg::eigvalsh(&definite(x)?, Triangle::Lower)),
        "cross" => one(linalg::cross(x, y(), axis())),
        "lu_factor" => linalg::lu_factor(&definite(x)?).map(|(f, pivots)| vec![f, pivots]),
        "rms_norm" => one(fast::rms_norm(x, args.get(1), 1e-3)),
        "layer_norm" => one(fast::layer_norm(x, args.get(1), args.get(2), 1e-3)),
        "rope" => one(fast::rope(
            x,
            p[0][0],
            p[0][1] != 0,
            RopeBase::Theta(100.0),
            1.0,
            p[0][2],
        )),
        "attention" => {
            let mask = match p[0][0] {
                0 => Mask::None,
                1 => Mask::Causal,
                _ => Mask::Array(&args[3]),
            };
            one(fast::scaled_dot_product_attention(
                x,
                y(),
                &args[2],
                0.5,
                mask,
            ))
        }
        "quantize" => one(quantized(step, x)?.dequantize(Dtype::Float32)),
        "quantized_matmul" if p[0][2] == 0 => one(quantized(step, y())?.matmul_transposed(x)),
        "quantized_matmul" => one(quantized(step, y())?.matmul(x)),
        "gather_mm" => one(x.gather_mm(y(), &args[2], &args[3], false)),
        "block_masked_mm" => {
            one(x.block_masked_mm(y(), 32, args.get(4), Some(&args[2]), Some(&args[3])))
        }
        "segmented_mm" => one(x.segmented_mm(y(), &args[2])),
        "hadamard" => one(x.hadamard_transform(None)),
        "bernoulli" => one(random::bernoulli(x, x.shape(), &Key::new(p[0][0] as u64)?)),
        "categorical" => one(random::categorical(x, axis(), &Key::new(p[0][1] as u64)?)),
        "uniform" => one(random::uniform(
            0.0,
            1.0,
            x.shape(),
            step.dtype,
            &Key::new(p[0][0] as u64)?,
        )),
        "permutation" => one(random::permutation(x, axis(), &Key::new(p[0][1] as u64)?)),
        name => Err(Error::new(
            ErrorKind::Unsupported,
            "programs",
            format!("no operation {name}"),
        )),
    }
}
