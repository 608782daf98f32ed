//! The formats of packed matrices that the kernels support.

use mlx_cpu_kernels::ScaleFormat;

use crate::error::{Error, ErrorKind};
use crate::ops::QuantMode;

/// Whether the kernels support codes of `bits` bits in groups of this size with these scales.
pub(super) fn takes(scales: ScaleFormat, bits: i32, group: i32) -> bool {
    let groups = u32::try_from(bits).map_or(&[][..], |bits| scales.groups(bits));
    usize::try_from(group).is_ok_and(|group| groups.contains(&group))
}

/// The number of words per row of `k` codes in MLX's packing.
pub(super) fn words_of(k: i32, bits: i32) -> i32 {
    (k / 32).saturating_mul(bits)
}

/// The bits and group size of a mode whose codes are floats; `None` for affine mode.
pub(super) fn float_format(mode: QuantMode) -> Option<(i32, i32)> {
    match mode {
        QuantMode::Affine => None,
        QuantMode::Mxfp4 => Some((4, 32)),
        QuantMode::Mxfp8 => Some((8, 32)),
        QuantMode::Nvfp4 => Some((4, 16)),
    }
}

/// The error for an array whose shape is not that of a part.
pub(super) fn lost() -> Error {
    Error::new(ErrorKind::Mlx, "cpu::QuantizedMatrix", "an axis was lost")
}
