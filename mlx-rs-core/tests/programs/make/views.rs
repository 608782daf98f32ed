//! Makes steps that are views: the same values in another layout.

use mlx_rs_core::Dtype;

use super::{Made, Maker};

impl Maker {
    pub(super) fn view(&mut self, name: &'static str) -> Made {
        let x = self.any();
        let (shape, dtype) = (self.values[x].shape().to_vec(), self.values[x].dtype());
        let n = shape.len();
        let r = &mut self.random;
        let axis = r.below(n.max(1)) as i32;
        let other = r.below(n.max(1)) as i32;
        let p: Vec<Vec<i32>> = match name {
            "transpose_axes" => vec![r.shuffled(n)],
            "slice" => {
                let (mut start, mut stop, mut step) = (vec![], vec![], vec![]);
                for &d in &shape {
                    let s = r.pick(&[1, 1, 1, 2, 3, -1, -1, -2, 5, -7]);
                    let (a, b) = (r.between(-1, d), r.between(-1, d));
                    let full_axis = r.once_in(2);
                    let (low, high) = (a.min(b).max(0), if r.once_in(2) { d } else { a.max(b) });
                    start.push(if s > 0 {
                        if full_axis { 0 } else { low }
                    } else if full_axis {
                        i32::MAX
                    } else {
                        high - 1
                    });
                    stop.push(if s > 0 {
                        if full_axis { d } else { high }
                    } else if full_axis || low == 0 {
                        i32::MIN
                    } else {
                        low - 1
                    });
                    step.push(s);
                }
                vec![start, stop, step]
            }
            "slice_axis" => {
                let d = *shape.get(axis as usize)?;
                let (a, b) = (r.between(0, d), r.between(0, d));
                vec![vec![axis, a.min(b), a.max(b)]]
            }
            "broadcast_to" => {
                let mut to: Vec<i32> = shape
                    .iter()
                    .map(|&d| if d == 1 { r.pick(&[1, 1, 2, 3, 5]) } else { d })
                    .collect();
                if r.once_in(3) {
                    to.insert(0, r.pick(&[1, 2, 3]));
                }
                vec![to]
            }
            "expand_dims" => vec![vec![r.between(0, n as i32)]],
            "squeeze_axis" => vec![vec![shape.iter().position(|&d| d == 1)? as i32]],
            "reshape" => vec![self.regroup(&shape)],
            "flatten" => vec![vec![axis.min(other), axis.max(other)]],
            "split" => {
                let d = *shape.get(axis as usize)?;
                let parts: Vec<i32> = (1..=d.min(6)).filter(|k| d % k == 0).collect();
                vec![vec![axis, *parts.get(r.below(parts.len()))?]]
            }
            "split_at" => {
                let d = *shape.get(axis as usize)?;
                let mut at = vec![r.between(0, d), r.between(0, d)];
                at.sort_unstable();
                vec![vec![axis], at]
            }
            "as_strided" => {
                let size: i32 = shape.iter().product();
                let (a, b) = (r.between(1, 4), r.between(1, 3));
                let (s, t) = (r.between(-1, 3), r.between(0, 2));
                let offset = if s < 0 { -s * (a - 1) } else { 0 };
                if size == 0 {
                    return None;
                }
                vec![vec![a, b], vec![s, t], vec![offset]]
            }
            "swap_axes" | "move_axis" => vec![vec![axis, other]],
            "diagonal" => vec![vec![r.between(-1, 1), axis, other]],
            "unflatten" => {
                let d = *shape.get(axis as usize)?;
                let parts: Vec<i32> = (1..=d).filter(|k| d % k == 0).collect();
                let k = *parts.get(r.below(parts.len()))?;
                vec![vec![axis], vec![k, d / k]]
            }
            _ => vec![],
        };
        let dtype = if name == "view" {
            use Dtype::*;
            // A view as floats is not made, because special floats would hide differences.
            self.random.pick(&[Uint8, Uint16, Int32, Uint64, Int8])
        } else {
            dtype
        };
        let p: Vec<&[i32]> = p.iter().map(Vec::as_slice).collect();
        self.push(name, &[x], &p, dtype).map(drop)
    }

    /// Another shape with the same number of elements.
    pub(super) fn regroup(&mut self, shape: &[i32]) -> Vec<i32> {
        let mut new: Vec<i32> = shape.to_vec();
        for _ in 0..=self.random.below(3) {
            let n = new.len();
            match self.random.below(4) {
                0 if n > 1 => {
                    let at = self.random.below(n - 1);
                    let joined = new[at] * new[at + 1];
                    new.splice(at..at + 2, [joined]);
                }
                1 => {
                    let at = self.random.below(n + 1);
                    new.insert(at, 1);
                }
                _ if n > 0 => {
                    let at = self.random.below(n);
                    let d = new[at];
                    let parts: Vec<i32> = (1..=d).filter(|k| d % k == 0).collect();
                    if !parts.is_empty() {
                        let k = parts[self.random.below(parts.len())];
                        new.splice(at..=at, [k, d / k]);
                    }
                }
                _ => {}
            }
        }
        new
    }
}
