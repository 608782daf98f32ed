//! Makes steps that are not views: binary operations, reductions, operations along one axis, and
//! others.

use mlx_rs_core::Dtype;

use super::{COUNT, INDEX, Made, Maker, NORMAL};

impl Maker {
    #[allow(clippy::too_many_lines)] // a few lines for each operation
    pub(super) fn other(&mut self, name: &'static str) -> Made {
        let x = self.any();
        let (shape, dtype) = (self.values[x].shape().to_vec(), self.values[x].dtype());
        let n = shape.len();
        let size: i32 = shape.iter().product();
        let axis = self.random.below(n.max(1));
        let length = shape.get(axis).copied();
        let at = axis as i32;
        let done = match name {
            "where" | "clip" => {
                let c = if name == "where" { Dtype::Bool } else { dtype };
                let (a, b) = (self.partner(&shape, c), self.partner(&shape, dtype));
                let args = if name == "where" {
                    [a, x, b]
                } else {
                    [x, a, b]
                };
                self.push(name, &args, &[], dtype)
            }
            "astype" => {
                let to = self.dtype();
                self.push(name, &[x], &[], to)
            }
            "take" | "take_clamped" => {
                let (index, ishape) = (self.index_type(), self.shape(2));
                let limit = length?.clamp(1, 127);
                let i = self.fresh(
                    &ishape,
                    index,
                    if name == "take" { COUNT } else { INDEX },
                    limit,
                );
                self.push(name, &[x, i], &[&[at]], dtype)
            }
            "take_along_axis" | "put_along_axis" | "scatter_add_axis" => {
                let mut ishape = shape.clone();
                *ishape.get_mut(axis)? = if name == "take_along_axis" {
                    self.random.between(0, 6)
                } else {
                    self.random.between(0, length?)
                };
                let index = self.index_type();
                // Indices must be distinct, because the order of writes to one element is
                // undefined. A slice of an argsort has distinct indices.
                let i = if name == "take_along_axis" {
                    self.fresh(&ishape, index, INDEX, length?.clamp(1, 127))
                } else {
                    let all = self.fresh(&shape, Dtype::Float32, NORMAL, 0);
                    let order = self.push("argsort", &[all], &[&[at, 0, 0]], Dtype::Uint32)?;
                    self.push(
                        "slice_axis",
                        &[order],
                        &[&[at, 0, ishape[axis]]],
                        Dtype::Uint32,
                    )?
                };
                if name == "take_along_axis" {
                    self.push(name, &[x, i], &[&[at]], dtype)
                } else {
                    let v = self.fresh(&ishape, dtype, NORMAL, 0);
                    self.push(name, &[x, i, v], &[&[at]], dtype)
                }
            }
            "gather" | "scatter" => {
                let named = self.random.below(n.min(3) + 1);
                let axes: Vec<i32> = self.random.shuffled(n)[..named].to_vec();
                let ishape = self.shape(2);
                let index = self.index_type();
                let mut block = shape.clone();
                for i in 0..n {
                    if axes.contains(&(i as i32)) {
                        block[i] = self.random.between(0, shape[i].min(2));
                        if self.random.once_in(2) {
                            block[i] = shape[i].min(1);
                        }
                    } else if name == "gather" && self.random.once_in(4) {
                        block[i] = self.random.between(0, shape[i]);
                    }
                }
                let mut args = vec![x];
                for &a in &axes {
                    let limit = shape[a as usize].clamp(1, 127);
                    args.push(self.fresh(&ishape, index, INDEX, limit));
                }
                if name == "gather" {
                    self.push(name, &args, &[&axes, &block], dtype)
                } else {
                    let lead = if named == 0 { vec![] } else { ishape };
                    let updates = [lead, block].concat();
                    if updates.iter().map(|&d| i64::from(d)).product::<i64>() > 6000 {
                        return None;
                    }
                    args.push(self.fresh(&updates, dtype, NORMAL, 0));
                    // The mode does not replace values, because the same place may be updated
                    // twice.
                    let mode = self.random.between(1, 3);
                    self.push(name, &args, &[&axes, &[mode]], dtype)
                }
            }
            "slice_update" => {
                let (mut start, mut stop, mut step, mut ushape) = (vec![], vec![], vec![], vec![]);
                for &d in &shape {
                    let s: i32 = self.random.pick(&[1, 1, 2, -1, -2]);
                    let (a, b) = (self.random.between(0, d), self.random.between(0, d));
                    let (low, high) = (a.min(b), a.max(b));
                    start.push(if s > 0 { low } else { high - 1 });
                    stop.push(if s > 0 {
                        high
                    } else if low == 0 {
                        i32::MIN
                    } else {
                        low - 1
                    });
                    if s < 0 && high == low {
                        return None;
                    }
                    step.push(s);
                    let count = (high - low + s.abs() - 1) / s.abs();
                    ushape.push(if self.random.once_in(5) {
                        count.min(1)
                    } else {
                        count
                    });
                }
                let u = self.fresh(&ushape, dtype, NORMAL, 0);
                self.push(name, &[x, u], &[&start, &stop, &step], dtype)
            }
            "slice_at" | "slice_update_at" => {
                let named = self.random.below(n + 1);
                let axes: Vec<i32> = self.random.shuffled(n)[..named].to_vec();
                let sizes: Vec<i32> = shape
                    .iter()
                    .map(|&d| self.random.between(d.min(1), d))
                    .collect();
                let start = self.fresh(&[named as i32], Dtype::Int32, COUNT, 6);
                if name == "slice_at" {
                    self.push(name, &[x, start], &[&axes, &sizes], dtype)
                } else {
                    let u = self.fresh(&sizes, dtype, NORMAL, 0);
                    self.push(name, &[x, start, u], &[&axes], dtype)
                }
            }
            "masked_scatter" => {
                let lead = self.random.below(n + 1);
                let mask = self.fresh(&shape[..lead], Dtype::Bool, NORMAL, 0);
                let mut rows = vec![self.random.between(1, 9)];
                rows.extend(&shape[lead..]);
                let v = self.fresh(&rows, dtype, NORMAL, 0);
                self.push(name, &[x, mask, v], &[], dtype)
            }
            "concatenate" | "stack" => {
                let mut args = vec![x];
                for _ in 0..self.random.below(3) {
                    let mut s = shape.clone();
                    if name == "concatenate" {
                        *s.get_mut(axis)? = self.random.between(0, 4);
                    }
                    let t = if self.random.once_in(5) {
                        self.dtype()
                    } else {
                        dtype
                    };
                    args.push(self.fresh(&s, t, NORMAL, 0));
                }
                self.push(name, &args, &[&[at]], dtype)
            }
            "pad" => {
                let axes = self.axes(n);
                let low: Vec<i32> = axes.iter().map(|_| self.random.between(0, 3)).collect();
                let high: Vec<i32> = axes.iter().map(|_| self.random.between(0, 3)).collect();
                let mode = self.random.between(0, 1);
                self.push(name, &[x], &[&axes, &low, &high, &[mode]], dtype)
            }
            "tile" => {
                let reps: Vec<i32> = (0..n + self.random.below(2))
                    .map(|_| self.random.between(0, 3))
                    .collect();
                self.push(name, &[x], &[&reps], dtype)
            }
            "matmul" | "addmm" | "inner" | "tensordot" | "einsum" | "gather_mm"
            | "segmented_mm" => self.product(name),
            "outer" => {
                let y = self.shape(1);
                let y = self.fresh(&y, dtype, NORMAL, 0);
                self.push(name, &[x, y], &[], dtype)
            }
            "tril" | "triu" => {
                let k = self.random.between(-3, 3);
                self.push(name, &[x], &[&[k]], dtype)
            }
            "conv" | "conv_transpose" => self.conv(name),
            "fft" | "rfft" | "irfft" | "fftn" | "rfftn" | "irfftn" | "fftshift" => {
                let axes = self.axes(n);
                let p = if name.starts_with("ffts") || name.ends_with("fftn") {
                    axes
                } else {
                    vec![at]
                };
                self.push(name, &[x], &[&p], dtype)
            }
            "qr" | "inv" | "solve" | "cholesky" | "singular_values" | "lu_factor" => {
                let dtype = self.random.pick(&[Dtype::Float32, Dtype::Float64]);
                let (m, mut k) = (self.random.between(1, 6), self.random.between(1, 6));
                if !matches!(name, "qr" | "singular_values") {
                    k = m;
                }
                let mut s = vec![m, k];
                if self.random.once_in(2) {
                    s.insert(0, self.random.between(1, 3));
                }
                let a = self.like(|a| a.shape() == s && a.dtype() == dtype, &s.clone(), dtype);
                if name == "solve" {
                    let b = self.fresh(&s, dtype, NORMAL, 0);
                    self.push(name, &[a, b], &[], dtype)
                } else {
                    let upper = self.random.between(0, 1);
                    self.push(name, &[a], &[&[upper]], dtype)
                }
            }
            "cross" => {
                let mut s = self.shape(2);
                s.push(self.random.between(2, 3));
                let dtype = self.dtype();
                let a = self.fresh(&s, dtype, NORMAL, 0);
                if self.random.once_in(3) {
                    let last = s.len() - 1;
                    s[last] = 5 - s[last];
                }
                let b = self.fresh(&s, dtype, NORMAL, 0);
                self.push(name, &[a, b], &[&[-1]], dtype)
            }
            "rms_norm" | "layer_norm" => {
                let last = *shape.last()?;
                let mut args = vec![x];
                for _ in 0..self
                    .random
                    .below(3)
                    .min(if name == "rms_norm" { 1 } else { 2 })
                {
                    args.push(self.fresh(&[last], dtype, NORMAL, 0));
                }
                self.push(name, &args, &[], dtype)
            }
            "rope" => {
                let dtype = self.float();
                let (h, l, d) = (
                    self.random.between(1, 3),
                    self.random.between(1, 5),
                    self.random.pick(&[2, 4, 8, 16]),
                );
                let b = self.random.between(1, 2);
                let x = self.fresh(&[b, h, l, d], dtype, NORMAL, 0);
                let dims = if self.random.once_in(2) { d } else { 2 };
                let (traditional, offset) = (self.random.between(0, 1), self.random.between(0, 9));
                self.push(name, &[x], &[&[dims, traditional, offset]], dtype)
            }
            "attention" => {
                let dtype = self.random.pick(&[
                    Dtype::Float32,
                    Dtype::Float32,
                    Dtype::Float16,
                    Dtype::Bfloat16,
                ]);
                let r = &mut self.random;
                let (b, kv, groups, l, s, d) = (
                    r.between(1, 2),
                    r.between(1, 2),
                    r.between(1, 2),
                    r.between(1, 5),
                    r.between(1, 9),
                    r.pick(&[1, 4, 8, 16]),
                );
                let mask = r.between(0, 2);
                let q = self.fresh(&[b, kv * groups, l, d], dtype, NORMAL, 0);
                let k = self.fresh(&[b, kv, s, d], dtype, NORMAL, 0);
                let v = self.fresh(&[b, kv, s, d], dtype, NORMAL, 0);
                let mut args = vec![q, k, v];
                if mask == 2 {
                    let t = if self.random.once_in(2) {
                        Dtype::Bool
                    } else {
                        dtype
                    };
                    args.push(self.fresh(&[1, 1, l, s], t, NORMAL, 0));
                }
                self.push(name, &args, &[&[mask]], dtype)
            }
            "quantize" | "quantized_matmul" => {
                let group = self.random.pick(&[32, 64]);
                let bits = self.random.pick(&[2, 3, 4, 5, 6, 8]);
                let plain = self.random.between(0, 1);
                let dtype = self
                    .random
                    .pick(&[Dtype::Float32, Dtype::Float16, Dtype::Bfloat16]);
                let (rows, m) = (
                    self.random.pick(&[1, 2, 8, 32, 33]),
                    self.random.between(1, 4),
                );
                let w = self.fresh(&[rows, group], dtype, NORMAL, 0);
                if name == "quantize" {
                    return self.push(name, &[w], &[&[group, bits, 0]], dtype).map(drop);
                }
                let x = self.fresh(
                    &[m, if plain == 0 { group } else { rows }],
                    dtype,
                    NORMAL,
                    0,
                );
                self.push(name, &[x, w], &[&[group, bits, plain]], dtype)
            }
            "block_masked_mm" => {
                let r = &mut self.random;
                let (b, m, k, n) = (
                    r.between(1, 3),
                    r.pick(&[1, 32, 40]),
                    r.pick(&[3, 32, 33]),
                    r.pick(&[2, 32, 35]),
                );
                let batched = r.once_in(2);
                let lead = |s: [i32; 2]| {
                    if batched {
                        vec![b, s[0], s[1]]
                    } else {
                        s.to_vec()
                    }
                };
                let tiles = |d: i32| (d + 31) / 32;
                let kind = if r.once_in(2) {
                    Dtype::Bool
                } else {
                    Dtype::Float32
                };
                let mut args = vec![];
                for s in [[m, k], [k, n]] {
                    args.push(self.fresh(&lead(s), Dtype::Float32, NORMAL, 0));
                }
                for s in [[m, k], [k, n], [m, n]] {
                    args.push(self.fresh(&lead([tiles(s[0]), tiles(s[1])]), kind, NORMAL, 0));
                }
                if self.random.once_in(2) {
                    args.pop();
                }
                self.push(name, &args, &[], Dtype::Float32)
            }
            "hadamard" => {
                let mut s = self.shape(2);
                s.push(self.random.pick(&[1, 2, 8, 12, 20, 24]));
                let dtype = self.random.pick(&[Dtype::Float32, Dtype::Float16]);
                let x = self.fresh(&s, dtype, NORMAL, 0);
                self.push(name, &[x], &[], dtype)
            }
            _ => None,
        };
        debug_assert!(size >= 0);
        done.map(drop)
    }
}
