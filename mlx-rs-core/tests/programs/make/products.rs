//! Makes steps that multiply matrices or convolve.

use mlx_rs_core::Dtype;

use super::{COUNT, Maker, NORMAL};

impl Maker {
    pub(super) fn product(&mut self, name: &'static str) -> Option<usize> {
        let dtype = match name {
            "gather_mm" => Dtype::Float32,
            _ if self.random.once_in(8) => Dtype::Complex64,
            _ => self.float(),
        };
        let r = &mut self.random;
        let (m, k, n, b) = (
            r.between(1, 9),
            r.pick(&[0, 1, 2, 5, 16, 17]),
            r.between(1, 9),
            r.between(1, 3),
        );
        match name {
            "matmul" => {
                let (mut s, mut t) = (vec![m, k], vec![k, n]);
                match r.below(5) {
                    0 => (s, t) = (vec![b, m, k], vec![b, k, n]),
                    1 => (s, t) = (vec![b, m, k], vec![k, n]),
                    2 => (s, t) = (vec![2, 1, m, k], vec![b, k, n]),
                    3 => s = vec![k],
                    _ => {}
                }
                let x = self.like(|a| a.shape() == s && a.dtype() == dtype, &s.clone(), dtype);
                let y = self.fresh(&t, dtype, NORMAL, 0);
                self.push(name, &[x, y], &[], dtype)
            }
            "addmm" => {
                let (x, y) = (
                    self.fresh(&[m, k], dtype, NORMAL, 0),
                    self.fresh(&[k, n], dtype, NORMAL, 0),
                );
                let c = self.partner(&[m, n], dtype);
                self.push(name, &[c, x, y], &[], dtype)
            }
            "inner" => {
                let (x, y) = (
                    self.fresh(&[m, k], dtype, NORMAL, 0),
                    self.fresh(&[n, k], dtype, NORMAL, 0),
                );
                self.push(name, &[x, y], &[], dtype)
            }
            "tensordot" => {
                let x = self.fresh(&[m, b, k], dtype, NORMAL, 0);
                let y = self.fresh(&[k, n, b], dtype, NORMAL, 0);
                self.push(name, &[x, y], &[&[1, 2], &[2, 0]], dtype)
            }
            "einsum" => {
                let which = self.random.between(0, 5);
                let (s, t) = match which {
                    0 => (vec![m, k], vec![k, n]),
                    1 => (vec![m, k], vec![n, k]),
                    2 | 5 => (vec![b, m, k], vec![b, k, n]),
                    3 => (vec![m, n], vec![m, n]),
                    _ => (vec![m, m], vec![m, n]),
                };
                let (x, y) = (
                    self.fresh(&s, dtype, NORMAL, 0),
                    self.fresh(&t, dtype, NORMAL, 0),
                );
                self.push(name, &[x, y], &[&[which]], dtype)
            }
            "gather_mm" => {
                let x = self.fresh(&[b, m, k], dtype, NORMAL, 0);
                let y = self.fresh(&[b, k, n], dtype, NORMAL, 0);
                let ishape = self.shape(1);
                let i = self.fresh(&ishape, Dtype::Uint32, COUNT, b);
                let j = self.fresh(&ishape, Dtype::Uint32, COUNT, b);
                self.push(name, &[x, y, i, j], &[], dtype)
            }
            _ => {
                let (x, y) = (
                    self.fresh(&[m, k], dtype, NORMAL, 0),
                    self.fresh(&[k, n], dtype, NORMAL, 0),
                );
                let segments = self.fresh(&[b, 2], Dtype::Uint32, COUNT, 18);
                self.push(name, &[x, y, segments], &[], dtype)
            }
        }
    }

    pub(super) fn conv(&mut self, name: &'static str) -> Option<usize> {
        let dtype = self.float();
        let axes = 1 + self.random.below(3);
        let mut lists: Vec<Vec<i32>> = vec![Vec::new(); 5];
        let (mut x, mut w) = (vec![self.random.between(1, 2)], Vec::new());
        let r = &mut self.random;
        let (inputs, outputs) = (r.between(1, 3), r.between(1, 3));
        let groups = if axes < 3 && r.once_in(3) { 2 } else { 1 };
        w.push(outputs * groups);
        for _ in 0..axes {
            x.push(r.between(1, 6));
            w.push(r.between(1, 3));
            lists[0].push(r.pick(&[1, 1, 2, 3]));
            lists[1].push(r.between(0, 3));
            lists[2].push(r.pick(&[1, 1, 2]));
            lists[3].push(if name == "conv" {
                r.pick(&[1, 1, 2])
            } else {
                1
            });
            lists[4].push(if name == "conv" { 0 } else { r.between(0, 1) });
        }
        x.push(inputs * groups);
        w.push(inputs);
        lists.push(vec![groups, r.between(0, 1)]);
        let x = self.fresh(&x, dtype, NORMAL, 0);
        let w = self.fresh(&w, dtype, NORMAL, 0);
        let lists: Vec<&[i32]> = lists.iter().map(Vec::as_slice).collect();
        self.push(name, &[x, w], &lists, dtype)
    }
}
