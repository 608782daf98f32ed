//! Types without blocks: each element is a number.

use half::{bf16 as Bf16, f16 as F16};

macro_rules! decode {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal, $read:expr;)*) => {$(
        $(#[$doc])*
        pub(super) fn $name(data: &[u8], out: &mut Vec<f32>) {
            let read = $read;
            out.extend(data.as_chunks::<$bytes>().0.iter().map(|bytes| read(*bytes)));
        }
    )*};
}

decode! {
    /// Single precision.
    f32: 4, f32::from_le_bytes;
    /// Double precision, as the nearest `f32`.
    f64: 8, |bytes| f64::from_le_bytes(bytes) as f32;
    /// Half precision.
    f16: 2, |bytes| F16::from_le_bytes(bytes).to_f32();
    /// The upper half of an `f32`.
    bf16: 2, |bytes| Bf16::from_le_bytes(bytes).to_f32();
    /// Signed, 8 bits.
    i8: 1, |bytes| f32::from(i8::from_le_bytes(bytes));
    /// Signed, 16 bits.
    i16: 2, |bytes| f32::from(i16::from_le_bytes(bytes));
    /// Signed, 32 bits, as the nearest `f32`.
    i32: 4, |bytes| i32::from_le_bytes(bytes) as f32;
    /// Signed, 64 bits, as the nearest `f32`.
    i64: 8, |bytes| i64::from_le_bytes(bytes) as f32;
}
