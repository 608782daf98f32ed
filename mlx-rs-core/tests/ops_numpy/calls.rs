//! Maps the calls of the golden file to the functions of this crate.

use mlx_rs_core::fast::{self, Mask, RopeBase};
use mlx_rs_core::linalg::{self, Norm, Triangle};
use mlx_rs_core::{
    All, Array, Axes, Conv, Dtype, Error, ErrorKind, GridIndexing, Pad, QuantMode, Quantized,
    Result, ScatterMode, Side, arange, bartlett, blackman, broadcast_arrays, concatenate,
    concatenate_flat, einsum, eye, fft, full, hamming, hanning, identity, linspace, meshgrid, ones,
    stack, tri, where_, zeros,
};

use super::operations::{self, Call};
use super::{Case, one};

/// Runs the call of a case.
pub(crate) fn make(c: &Case<'_>) -> Result<Vec<Array>> {
    for group in [
        of_table, composed, elements, reductions, shapes, choices, made, products, algebra, fused,
    ] {
        if let Some(result) = group(c) {
            return result;
        }
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        "golden",
        format!("{} is not called", c.op),
    ))
}

type Made = Option<Result<Vec<Array>>>;

/// Runs a call of the shared table of operations.
fn of_table(c: &Case<'_>) -> Made {
    let list = c.ints("axes");
    // A single axis, several axes and all axes call different functions of MLX.
    let axes = || match &list[..] {
        _ if c.is_null("axes") => Axes::All,
        [one] => Axes::One(*one),
        many => Axes::Many(many),
    };
    let lengths = (!c.is_null("n")).then(|| c.ints("n"));
    Some(one(match operations::named(c.op)?.call {
        Call::One(f) => f(c.a()),
        Call::Two(f) => f(c.a(), c.b()),
        Call::Reduce(f) => f(c.a(), axes(), c.flag("keep")),
        Call::Scan(f) => f(c.a(), c.int("axis"), c.flag("reverse"), c.flag("inclusive")),
        Call::Axis(f) => f(c.a(), c.int("axis")),
        Call::Fourier(f) => f(c.a(), (!c.is_null("n")).then(|| c.int("n")), c.int("axis")),
        Call::Fourier2(f) => f(c.a(), lengths.map(|n| [n[0], n[1]]), [list[0], list[1]]),
        Call::FourierN(f) => f(c.a(), lengths.as_deref(), Axes::Many(&list)),
        Call::Shift(f) if c.is_null("axes") => f(c.a(), Axes::All),
        Call::Shift(f) => f(c.a(), Axes::Many(&list)),
        // In the golden file, these calls have a name for each number.
        Call::Numbers(_) => return None,
    }))
}

fn composed(c: &Case<'_>) -> Made {
    let bounds = || [c.ints("start"), c.ints("stop"), c.ints("strides")];
    let combined = |f: Combine| {
        let [start, stop, strides] = bounds();
        f(c.a(), c.b(), &start, &stop, &strides)
    };
    Some(one(match c.op {
        "unstack" => return Some(c.a().unstack(c.int("axis"))),
        "slogdet" => return Some(linalg::slogdet(c.a()).map(|(sign, log)| vec![sign, log])),
        "flip" if c.is_null("axes") => c.a().flip(All),
        "flip" => c.a().flip(c.ints("axes")[0]),
        "diff" => c.a().diff(c.int("times") as u32, c.int("axis")),
        "vecdot" => c.a().vecdot(c.b(), c.int("axis")),
        "slice_add" => combined(Array::slice_add),
        "slice_multiply" => combined(Array::slice_multiply),
        "slice_maximum" => combined(Array::slice_maximum),
        "slice_minimum" => combined(Array::slice_minimum),
        "searchsorted" => {
            let side = if c.text("side") == "left" {
                Side::Left
            } else {
                Side::Right
            };
            c.a().searchsorted(c.b(), side)
        }
        "bartlett" => bartlett(c.int("n")),
        "blackman" => blackman(c.int("n")),
        "hamming" => hamming(c.int("n")),
        "hanning" => hanning(c.int("n")),
        "fftfreq" => fft::fftfreq(c.int("n"), c.number("d")),
        "rfftfreq" => fft::rfftfreq(c.int("n"), c.number("d")),
        "det" => linalg::det(c.a()),
        "cross_entropy" => fast::cross_entropy(c.a(), c.b()),
        _ => return None,
    }))
}

/// Updates a part of an array: the array, the update, start, stop and strides.
type Combine = fn(&Array, &Array, &[i32], &[i32], &[i32]) -> Result<Array>;

fn elements(c: &Case<'_>) -> Made {
    let nan = |c: &Case<'_>| c.a().nan_to_num(c.number("n") as f32, None, None);
    Some(one(match c.op {
        "astype" => c.a().astype(c.dtype()),
        "clip" => c.a().clip(Some(c.b()), Some(c.c())),
        "divmod" => return Some(c.a().divmod(c.b()).map(|(q, r)| vec![q, r])),
        "from_fp8" => c.a().from_fp8(c.dtype()),
        "is_close" => {
            let (rtol, atol) = (c.number("rtol"), c.number("atol"));
            c.a().is_close(c.b(), rtol, atol, c.flag("nan"))
        }
        "nan_to_num" => nan(c),
        "round" => c.a().round(c.int("n")),
        "view" => c.a().view(c.dtype()),
        "where" => where_(c.a(), c.b(), c.c()),
        _ => return None,
    }))
}

fn reductions(c: &Case<'_>) -> Made {
    let list = c.ints("axes");
    // A single axis, several axes and all axes call different functions of MLX.
    let axes = || match &list[..] {
        _ if c.is_null("axes") => Axes::All,
        [one] => Axes::One(*one),
        many => Axes::Many(many),
    };
    let keep = c.flag("keep");
    Some(one(match c.op {
        "var" => c.a().var(axes(), keep, c.int("ddof")),
        "std" => c.a().std(axes(), keep, c.int("ddof")),
        "argmax" => c.a().argmax(c.int("axis"), false),
        "argmin" => c.a().argmin(c.int("axis"), false),
        "argmax_flat" => c.a().argmax_flat(false),
        "argmin_flat" => c.a().argmin_flat(false),
        _ => return None,
    }))
}

fn shapes(c: &Case<'_>) -> Made {
    let pad = |c: &Case<'_>| {
        let mode = match c.text("mode") {
            "edge" => Pad::Edge,
            "value" => Pad::Value(c.b()),
            _ => Pad::Zero,
        };
        c.a()
            .pad(&c.ints("axes"), &c.ints("low"), &c.ints("high"), mode)
    };
    Some(one(match c.op {
        "transpose_axes" => c.a().transpose_axes(&c.ints("axes")),
        "reshape" => c.a().reshape(&c.ints("shape")),
        "tile" => c.a().tile(&c.ints("reps")),
        "roll" if c.is_null("axes") => c.a().roll(c.int("shift"), All),
        "roll" => c.a().roll(c.int("shift"), c.ints("axes")[0]),
        "roll_axes" => c.a().roll_axes(&c.ints("shifts"), &c.ints("axes")),
        "pad" => pad(c),
        "pad_symmetric" => c.a().pad_symmetric(c.int("n"), Pad::Zero),
        "repeat" => c.a().repeat(c.int("n"), c.int("axis")),
        "repeat_flat" => c.a().repeat_flat(c.int("n")),
        "slice" => c
            .a()
            .slice(&c.ints("start"), &c.ints("stop"), &c.ints("strides")),
        "slice_update" => {
            let (start, stop) = (c.ints("start"), c.ints("stop"));
            let update = c.b().expand_dims(0);
            update.and_then(|u| c.a().slice_update(&u, &start, &stop, &c.ints("strides")))
        }
        "swap_axes" => c.a().swap_axes(c.int("a"), c.int("b")),
        "move_axis" => c.a().move_axis(c.int("a"), c.int("b")),
        "flatten" => c.a().flatten(c.int("a"), c.int("b")),
        "unflatten" => c.a().unflatten(c.int("axis"), &c.ints("shape")),
        "expand_dims" if c.ints("axes").len() == 1 => c.a().expand_dims(c.ints("axes")[0]),
        "expand_dims" => c.a().expand_dims_axes(&c.ints("axes")),
        "squeeze_axes" => c.a().squeeze_axes(&c.ints("axes")),
        "broadcast_to" => c.a().broadcast_to(&c.ints("shape")),
        "as_strided" => {
            let strides: Vec<i64> = c.ints("strides").into_iter().map(i64::from).collect();
            c.a()
                .as_strided(&c.ints("shape"), &strides, c.int("offset") as usize)
        }
        "concatenate" => concatenate(&c.refs(), c.int("axis")),
        "concatenate_flat" => concatenate_flat(&c.refs()),
        "stack" => stack(&c.refs(), c.int("axis")),
        "split" => return Some(c.a().split(c.int("n"), c.int("axis"))),
        "split_at" => return Some(c.a().split_at(&c.ints("at"), c.int("axis"))),
        "broadcast_arrays" => return Some(broadcast_arrays(&c.refs())),
        "meshgrid" => {
            let indexing = match c.text("indexing") {
                "ij" => GridIndexing::Ij,
                _ => GridIndexing::Xy,
            };
            return Some(meshgrid(&c.refs(), c.flag("sparse"), indexing));
        }
        _ => return None,
    }))
}

/// Sorts both sides of a partition, whose order MLX does not define.
fn settled(a: &Array, rank: i32) -> Result<Array> {
    let n = a.dim(-1)?;
    let part = |from, to| a.slice_axis(-1, from, to)?.sort(-1);
    concatenate(
        &[
            &part(0, rank)?,
            &a.slice_axis(-1, rank, rank + 1)?,
            &part(rank + 1, n)?,
        ],
        -1,
    )
}

fn choices(c: &Case<'_>) -> Made {
    let scatter = |c: &Case<'_>| {
        let mode = match c.text("mode") {
            "add" => ScatterMode::Add,
            "prod" => ScatterMode::Prod,
            "max" => ScatterMode::Max,
            "min" => ScatterMode::Min,
            _ => ScatterMode::Replace,
        };
        c.a().scatter(&[c.b()], c.c(), &c.ints("axes"), mode)
    };
    Some(one(match c.op {
        "take" => c.a().take(c.b(), c.int("axis")),
        "take_along_axis" => c.a().take_along_axis(c.b(), c.int("axis")),
        "put_along_axis" => c.a().put_along_axis(c.b(), c.c(), c.int("axis")),
        "masked_scatter" => c.a().masked_scatter(c.b(), c.c()),
        "scatter" => scatter(c),
        "scatter_add_axis" => c.a().scatter_add_axis(c.b(), c.c(), c.int("axis")),
        "gather" => c
            .a()
            .gather(&c.refs()[1..], &c.ints("axes"), &c.ints("sizes")),
        "slice_at" => c.a().slice_at(c.b(), &c.ints("axes"), &c.ints("sizes")),
        "slice_update_at" => c.a().slice_update_at(c.b(), c.c(), &c.ints("axes")),
        "partition" => {
            let rank = c.int("rank");
            // Gathering by the indices of `argpartition` must have the same result.
            let indices = c.a().argpartition(rank, c.int("axis"));
            let by_index = indices.and_then(|i| c.a().take_along_axis(&i, c.int("axis")));
            let direct = c
                .a()
                .partition(rank, c.int("axis"))
                .and_then(|a| settled(&a, rank));
            return Some(by_index.and_then(|i| settled(&i, rank)).and_then(|i| {
                let direct = direct?;
                assert!(
                    i.array_equal(&direct)?,
                    "argpartition differs from partition"
                );
                Ok(vec![direct])
            }));
        }
        "partition_flat" => {
            let rank = c.int("rank");
            let flat = c.a().reshape(&[-1]);
            let by_index = c
                .a()
                .argpartition_flat(rank)
                .and_then(|i| flat?.take(&i, 0));
            return Some(by_index.and_then(|i| settled(&i, rank)).and_then(|i| {
                let direct = settled(&c.a().partition_flat(rank)?, rank)?;
                assert!(
                    i.array_equal(&direct)?,
                    "argpartition differs from partition"
                );
                Ok(vec![direct])
            }));
        }
        "topk" => c
            .a()
            .topk(c.int("k"), c.int("axis"))
            .and_then(|a| a.sort(-1)),
        "topk_flat" => c.a().topk_flat(c.int("k")).and_then(|a| a.sort(-1)),
        _ => return None,
    }))
}

fn made(c: &Case<'_>) -> Made {
    Some(one(match c.op {
        "arange" => arange(
            c.number("start"),
            c.number("stop"),
            c.number("step"),
            c.dtype(),
        ),
        "eye" => eye(c.int("n"), c.int("m"), c.int("k"), c.dtype()),
        "identity" => identity(c.int("n"), c.dtype()),
        "tri" => tri(c.int("n"), c.int("m"), c.int("k"), c.dtype()),
        "zeros" => zeros(&c.ints("shape"), c.dtype()),
        "ones" => ones(&c.ints("shape"), c.dtype()),
        "full" => full(&c.ints("shape"), c.a(), c.dtype()),
        "linspace" => linspace(c.number("start"), c.number("stop"), c.int("n"), c.dtype()),
        "tril" => c.a().tril(c.int("k")),
        "triu" => c.a().triu(c.int("k")),
        "diag" => c.a().diag(c.int("k")),
        "diagonal" => c.a().diagonal(c.int("k"), 0, 1),
        "trace" => c.a().trace(0, 0, 1, c.dtype()),
        _ => return None,
    }))
}

fn products(c: &Case<'_>) -> Made {
    let plan = || Conv {
        stride: c.ints("stride"),
        padding: c.ints("padding"),
        dilation: c.ints("dilation"),
        input_dilation: c.ints("input_dilation"),
        output_padding: c.ints("output_padding"),
        groups: if c.is_null("groups") {
            0
        } else {
            c.int("groups")
        },
        flip: c.flag("flip"),
    };
    let quantized = |first: usize| Quantized {
        weight: c.inputs[first].clone(),
        scales: c.inputs[first + 1].clone(),
        biases: Some(c.inputs[first + 2].clone()),
        group_size: 32,
        bits: c.int("bits"),
        mode: QuantMode::Affine,
    };
    Some(one(match c.op {
        "tensordot" => c.a().tensordot(c.b(), c.int("n")),
        "tensordot_axes" => c.a().tensordot_axes(c.b(), &c.ints("a"), &c.ints("b")),
        "einsum" => einsum(c.text("subscripts"), &c.refs()),
        "addmm" => {
            let (alpha, beta) = (c.number("alpha") as f32, c.number("beta") as f32);
            c.a().addmm(c.b(), c.c(), alpha, beta)
        }
        "gather_mm" => c.a().gather_mm(c.b(), c.c(), &c.inputs[3], false),
        "segmented_mm" => c.a().segmented_mm(c.b(), c.c()),
        "block_masked_mm" => c
            .a()
            .block_masked_mm(c.b(), 32, Some(c.c()), None, None)
            .and_then(|y| y.sum(-1, false)),
        "hadamard_transform" => c.a().hadamard_transform(None),
        "conv" => c.a().conv(c.b(), &plan()),
        "conv_transpose" => c.a().conv_transpose(c.b(), &plan()),
        "dequantize" => quantized(0).dequantize(Dtype::Float32),
        "quantized_matmul" => quantized(1).matmul_transposed(c.a()),
        "quantized_matmul_back" => quantized(1).matmul(c.a()),
        _ => return None,
    }))
}

fn algebra(c: &Case<'_>) -> Made {
    let upper = c.flag("upper");
    Some(one(match c.op {
        "cholesky" => linalg::cholesky(c.a(), upper),
        "cholesky_inv" => linalg::cholesky_inv(c.a(), upper),
        "tri_inv" => linalg::tri_inv(c.a(), upper),
        "solve_triangular" => linalg::solve_triangular(c.a(), c.b(), upper),
        "eigvalsh" => linalg::eigvalsh(c.a(), Triangle::Lower),
        "cross" => linalg::cross(c.a(), c.b(), c.int("axis")),
        "norm" => {
            let which = match c.text("p") {
                "fro" => Norm::Frobenius,
                "nuc" => Norm::Nuclear,
                _ if c.is_null("p") => Norm::L2,
                _ => Norm::P(c.number("p")),
            };
            let list = c.ints("axes");
            let axes = if c.is_null("axes") {
                Axes::All
            } else {
                Axes::Many(&list)
            };
            linalg::norm(c.a(), which, axes, c.flag("keep"))
        }
        "lu" => return Some(linalg::lu(c.a()).map(|(p, l, u)| vec![p, l, u])),
        "lu_factor" => return Some(linalg::lu_factor(c.a()).map(|(lu, p)| vec![lu, p])),
        _ => return None,
    }))
}

fn fused(c: &Case<'_>) -> Made {
    Some(one(match c.op {
        "rms_norm" => fast::rms_norm(c.a(), Some(c.b()), 1e-5),
        "layer_norm" => fast::layer_norm(c.a(), Some(c.b()), Some(c.c()), 1e-5),
        "rope" => {
            let (dims, scale) = (c.int("dims"), c.number("scale") as f32);
            let base = RopeBase::Theta(c.number("base") as f32);
            let (traditional, offset) = (c.flag("traditional"), c.int("offset"));
            let at = Array::scalar(offset);
            // Both forms of the position argument must have the same result.
            let dynamic =
                at.and_then(|at| fast::rope_at(c.a(), dims, traditional, base, scale, &at));
            let plain = fast::rope(c.a(), dims, traditional, base, scale, offset);
            return Some(plain.and_then(|y| {
                assert!(
                    y.all_close(&dynamic?, 1e-5, 1e-6)?,
                    "rope_at differs from rope"
                );
                Ok(vec![y])
            }));
        }
        "attention" => {
            let scale = c.number("scale") as f32;
            let (mask, sinks) = match c.text("mask") {
                "causal" => (Mask::Causal, None),
                "array" => (Mask::Array(&c.inputs[3]), None),
                "sinks" => (Mask::None, Some(&c.inputs[3])),
                _ => (Mask::None, None),
            };
            fast::scaled_dot_product_attention_with_sinks(c.a(), c.b(), c.c(), scale, mask, sinks)
        }
        _ => return None,
    }))
}
