//! Values of arrays outside MLX, as bytes in row-major order.

use mlx_rs_core::{Array, Complex32, Dtype, Element, Result, bf16, f16};

/// A pseudo-random number generator. A seed always produces the same numbers.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// An integer from `low` to `high`, both included.
    pub fn between(&mut self, low: i32, high: i32) -> i32 {
        low + self.below((high - low).max(0) as usize + 1) as i32
    }

    /// True in one of `n` cases.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<i32> {
        let mut list: Vec<i32> = (0..n as i32).collect();
        for i in (1..n).rev() {
            list.swap(i, self.below(i + 1));
        }
        list
    }
}

#[derive(Clone, PartialEq)]
pub struct Value {
    pub dtype: Dtype,
    pub shape: Vec<i32>,
    pub bytes: Vec<u8>,
}

fn items_of<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    let each = bytes.chunks_exact(size_of::<T>());
    each.map(bytemuck::pod_read_unaligned).collect()
}

fn array_of<T: Element + bytemuck::Pod>(value: &Value) -> Result<Array> {
    let items: Vec<T> = items_of(&value.bytes);
    Array::from_slice(&items, &value.shape)
}

impl Value {
    /// Evaluates `array` and reads its values.
    pub fn read(array: &Array) -> Result<Self> {
        Ok(Self {
            dtype: array.dtype(),
            shape: array.shape().to_vec(),
            bytes: array.bytes()?.to_vec(),
        })
    }

    /// Makes a row-major array of the values.
    pub fn array(&self) -> Result<Array> {
        match self.dtype {
            Dtype::Bool => {
                let items: Vec<bool> = self.bytes.iter().map(|&b| b != 0).collect();
                Array::from_slice(&items, &self.shape)
            }
            Dtype::Uint8 => array_of::<u8>(self),
            Dtype::Uint16 => array_of::<u16>(self),
            Dtype::Uint32 => array_of::<u32>(self),
            Dtype::Uint64 => array_of::<u64>(self),
            Dtype::Int8 => array_of::<i8>(self),
            Dtype::Int16 => array_of::<i16>(self),
            Dtype::Int32 => array_of::<i32>(self),
            Dtype::Int64 => array_of::<i64>(self),
            Dtype::Float16 => {
                let items: Vec<u16> = items_of(&self.bytes);
                let items: Vec<f16> = items.into_iter().map(f16::from_bits).collect();
                Array::from_slice(&items, &self.shape)
            }
            Dtype::Bfloat16 => {
                let items: Vec<u16> = items_of(&self.bytes);
                let items: Vec<bf16> = items.into_iter().map(bf16::from_bits).collect();
                Array::from_slice(&items, &self.shape)
            }
            Dtype::Float32 => array_of::<f32>(self),
            Dtype::Float64 => array_of::<f64>(self),
            _ => {
                let items: Vec<[f32; 2]> = items_of(&self.bytes);
                let items: Vec<Complex32> = items
                    .iter()
                    .map(|&[re, im]| Complex32::new(re, im))
                    .collect();
                Array::from_slice(&items, &self.shape)
            }
        }
    }

    /// The elements in reverse order.
    pub fn reversed(&self) -> Self {
        let bytes = self.bytes.chunks_exact(self.dtype.size()).rev().flatten();
        Self {
            bytes: bytes.copied().collect(),
            ..self.clone()
        }
    }

    /// All values as doubles. A complex value becomes two numbers.
    pub fn numbers(&self) -> Vec<f64> {
        fn all<T: bytemuck::AnyBitPattern>(bytes: &[u8], f: impl Fn(T) -> f64) -> Vec<f64> {
            let items: Vec<T> = items_of(bytes);
            items.into_iter().map(f).collect()
        }
        let b = &self.bytes;
        match self.dtype {
            Dtype::Bool | Dtype::Uint8 => all::<u8>(b, f64::from),
            Dtype::Uint16 => all::<u16>(b, f64::from),
            Dtype::Uint32 => all::<u32>(b, f64::from),
            Dtype::Uint64 => all::<u64>(b, |v| v as f64),
            Dtype::Int8 => all::<i8>(b, f64::from),
            Dtype::Int16 => all::<i16>(b, f64::from),
            Dtype::Int32 => all::<i32>(b, f64::from),
            Dtype::Int64 => all::<i64>(b, |v| v as f64),
            Dtype::Float16 => all::<u16>(b, |v| f16::from_bits(v).to_f64()),
            Dtype::Bfloat16 => all::<u16>(b, |v| bf16::from_bits(v).to_f64()),
            Dtype::Float64 => all::<f64>(b, |v| v),
            _ => all::<f32>(b, f64::from),
        }
    }

    /// Converts numbers, in row-major order, to `dtype`.
    pub fn from_numbers(numbers: &[f64], shape: &[i32], dtype: Dtype) -> Result<Self> {
        if dtype == Dtype::Complex64 {
            let items: Vec<Complex32> = numbers
                .iter()
                .map(|&v| Complex32::new(v as f32, (v * 0.75 - 0.5) as f32))
                .collect();
            return Self::read(&Array::from_slice(&items, shape)?);
        }
        Self::read(&Array::from_slice(numbers, shape)?.astype(dtype)?)
    }

    /// The spacing of values of this type near one; zero for integers.
    pub fn epsilon(dtype: Dtype) -> f64 {
        match dtype {
            Dtype::Float16 => 9.8e-4,
            Dtype::Bfloat16 => 7.9e-3,
            Dtype::Float32 | Dtype::Complex64 => 1.2e-7,
            Dtype::Float64 => 2.3e-16,
            _ => 0.0,
        }
    }

    /// Describes where `self` and `other` differ by more than `tolerance` times the spacing of
    /// values of the type near `scale`.
    pub fn difference(&self, other: &Self, tolerance: f64, scale: f64) -> Option<String> {
        if (self.dtype, &self.shape) != (other.dtype, &other.shape) {
            return Some(format!(
                "{}{:?} against {}{:?}",
                self.dtype, self.shape, other.dtype, other.shape
            ));
        }
        if self.bytes == other.bytes {
            return None;
        }
        let (a, b) = (self.numbers(), other.numbers());
        let finite = a.iter().chain(&b).filter(|v| v.is_finite());
        let scale = finite.fold(scale, |m, v| m.max(v.abs()));
        let room = tolerance * Self::epsilon(self.dtype) * scale;
        let limit = match self.dtype {
            Dtype::Float16 => 6.0e4,
            _ => 3.0e38,
        };
        let far = |x: f64, y: f64| {
            let same = x == y || (x.is_nan() && y.is_nan()) || (x - y).abs() <= room;
            // Near the largest float, a sum may overflow in one order of additions and not in
            // another.
            let lost = self.dtype == Dtype::Complex64 && !x.is_finite() && !y.is_finite();
            let edge =
                tolerance > 0.0 && (lost || (x.abs() > 0.9 * limit && y.abs() > 0.9 * limit));
            !same && !edge
        };
        let at = a.iter().zip(&b).position(|(&x, &y)| far(x, y))?;
        let count = a.iter().zip(&b).filter(|&(&x, &y)| far(x, y)).count();
        Some(format!(
            "{count} of {} numbers, first number {at}: {} against {} (room {room:e})",
            a.len(),
            a[at],
            b[at]
        ))
    }
}
