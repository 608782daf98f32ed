//! Converts blocks of GGUF types: decodes them to floats, or packs them into a [`Layout`]. The
//! traits of `kinds.rs` parse the blocks.

use half::f16;

use super::bits::{pack_group, pack_nibbles, pack_pairs, pack_six};
use super::blocks::{half_of, k_scales, part, q2_k, q6_k};
use super::codes::{mxfp4, power_of_two};
use super::kinds::{AffineBlocks, SuperAffineBlocks, SymmetricBlocks, TableBlocks};
use super::layout::{GROUP, Layout, Misfit};
use super::nibble_codes::NibbleCodes;

/// Scales and biases of groups, in MLX's affine form.
pub(super) type Factors<'a> = (&'a mut [f32], &'a mut [f32]);

/// Appends the decoded values of blocks.
pub(super) type Decode = fn(&[u8], &mut Vec<f32>);

/// Writes the arrays of a layout. Their lengths must match the data.
pub(super) type Pack = fn(&[u8], &mut [&mut [u8]]) -> Result<(), Misfit>;

/// Writes the codes, scales and biases of MLX's affine form.
pub(super) type Repack = fn(&[u8], &mut [u32], Factors<'_>);

/// The conversion functions of a type. Each accepts whole blocks only.
pub(super) struct Coding {
    pub layout: Layout,
    pub decode: Decode,
    pub pack: Pack,
    /// Repacks to MLX's affine form, if the layout has [`Layout::affine_bits`].
    pub affine: Option<Repack>,
}

/// The code that means zero in [`Layout::Symmetric`].
const fn zero_code(bits: u32) -> u8 {
    match bits {
        // The codes are 0, 1 and 2.
        2 => 1,
        _ => 1 << (bits - 1),
    }
}

/// A type that can only be decoded to floats.
pub(super) const fn floats(decode: Decode) -> Coding {
    Coding {
        layout: Layout::Floats,
        decode,
        pack: |_, _| Err(Misfit::Layout),
        affine: None,
    }
}

/// See [`AffineBlocks`].
pub(super) const fn affine<B: AffineBlocks>() -> Coding {
    Coding {
        layout: Layout::Affine { bits: B::BITS },
        decode: |data, out| {
            B::groups(data, |q, scale, bias| {
                out.extend(q.iter().map(|&q| scale * f32::from(q) + bias));
            });
        },
        pack: |_, _| Err(Misfit::Layout),
        affine: Some(|data, words, factors| {
            let mut add = affine_writer(B::BITS, words, factors);
            B::groups(data, |q, scale, bias| add(q, scale, bias));
        }),
    }
}

/// See [`SymmetricBlocks`].
pub(super) const fn symmetric<B: SymmetricBlocks>() -> Coding {
    Coding {
        layout: Layout::Symmetric { bits: B::BITS },
        decode: |data, out| {
            // The integer difference comes first, so that a zero keeps the sign of the scale.
            let zero = f32::from(zero_code(B::BITS));
            B::groups(data, |q, scale| {
                let scale = scale.to_f32();
                out.extend(q.iter().map(|&q| scale * (f32::from(q) - zero)));
            });
        },
        pack: |data, out| {
            let [words, scales] = parts(out)?;
            let mut words = cast::<u32>(words)?.chunks_exact_mut(B::BITS as usize);
            let mut scales = cast::<f16>(scales)?.iter_mut();
            B::groups(data, |q, scale| {
                if let (Some(words), Some(to)) = (words.next(), scales.next()) {
                    pack_group(B::BITS, q, words);
                    *to = scale;
                }
            });
            Ok(())
        },
        affine: Some(|data, words, factors| {
            let zero = f32::from(zero_code(B::BITS));
            let mut add = affine_writer(B::BITS, words, factors);
            B::groups(data, |q, scale| {
                let scale = scale.to_f32();
                add(q, scale, -zero * scale);
            });
        }),
    }
}

/// See [`SuperAffineBlocks`].
pub(super) const fn super_affine<B: SuperAffineBlocks>() -> Coding {
    Coding {
        layout: Layout::SuperAffine {
            bits: B::BITS,
            group: GROUP,
        },
        decode: |data, out| {
            B::blocks(data, |start, groups| {
                for ((scale, bias), q) in k_factors(start).into_iter().zip(&groups) {
                    out.extend(q.iter().map(|&q| scale * f32::from(q) + bias));
                }
            });
        },
        pack: |data, out| {
            let [words, bytes, supers] = parts(out)?;
            let mut words = cast::<u32>(words)?.chunks_exact_mut(B::BITS as usize);
            let mut bytes = cast::<i8>(bytes)?.as_chunks_mut::<2>().0.iter_mut();
            let mut supers = cast::<f16>(supers)?.as_chunks_mut::<2>().0.iter_mut();
            B::blocks(data, |start, groups| {
                if let Some(supers) = supers.next() {
                    *supers = k_halves(start);
                }
                for ((scale, min), q) in k_scales(start).into_iter().zip(&groups) {
                    if let (Some(words), Some(bytes)) = (words.next(), bytes.next()) {
                        pack_group(B::BITS, q, words);
                        // Both values have six bits, so they fit into a byte.
                        *bytes = [scale as i8, min as i8];
                    }
                }
            });
            Ok(())
        },
        affine: Some(|data, words, factors| {
            let mut add = affine_writer(B::BITS, words, factors);
            B::blocks(data, |start, groups| {
                for ((scale, bias), q) in k_factors(start).into_iter().zip(&groups) {
                    add(q, scale, bias);
                }
            });
        }),
    }
}

/// `Q2_K`.
pub(super) const fn super_affine_2_bits() -> Coding {
    Coding {
        layout: Layout::SuperAffine { bits: 2, group: 16 },
        decode: |data, out| {
            q2_k(data, |[d, dmin], scale, min, codes| {
                let scale = d.to_f32() * f32::from(scale);
                let bias = -(dmin.to_f32() * f32::from(min));
                out.extend(codes.map(|q| scale * f32::from(q) + bias));
            });
        },
        pack: |data, out| {
            let [words, bytes, supers] = parts(out)?;
            let mut words = cast::<u32>(words)?.iter_mut();
            let mut bytes = cast::<i8>(bytes)?.as_chunks_mut::<2>().0.iter_mut();
            let mut supers = cast::<f16>(supers)?.as_chunks_mut::<2>().0.iter_mut();
            let mut groups = 0usize;
            q2_k(data, |halves, scale, min, codes| {
                // The kernels read `d` and `m` for each eight groups, and a block has sixteen.
                if groups.is_multiple_of(8)
                    && let Some(to) = supers.next()
                {
                    *to = halves;
                }
                groups += 1;
                if let (Some(word), Some(bytes)) = (words.next(), bytes.next()) {
                    *word = pack_pairs(&codes);
                    // Both values have four bits, so they fit into a byte.
                    *bytes = [scale as i8, min as i8];
                }
            });
            Ok(())
        },
        affine: None,
    }
}

/// `Q6_K`.
pub(super) const fn super_scaled() -> Coding {
    Coding {
        layout: Layout::SuperScaled,
        decode: |data, out| {
            q6_k(data, |d, scale, codes| {
                let scale = d.to_f32() * f32::from(scale);
                out.extend(codes.map(|q| scale * (f32::from(q) - 32.0)));
            });
        },
        pack: |data, out| {
            let [words, scales, supers] = parts(out)?;
            let mut words = cast::<u32>(words)?.as_chunks_mut::<3>().0.iter_mut();
            let mut scales = cast::<i8>(scales)?.iter_mut();
            let mut supers = cast::<f16>(supers)?.iter_mut();
            let mut groups = 0usize;
            q6_k(data, |d, scale, codes| {
                if groups.is_multiple_of(16)
                    && let Some(to) = supers.next()
                {
                    *to = d;
                }
                groups += 1;
                if let (Some(words), Some(to)) = (words.next(), scales.next()) {
                    *words = pack_six(&codes);
                    *to = scale;
                }
            });
            Ok(())
        },
        affine: None,
    }
}

/// `MXFP4`.
pub(super) const fn powers() -> Coding {
    Coding {
        layout: Layout::Powers,
        decode: |data, out| {
            let (integers, unit) = NibbleCodes::E2m1.integers();
            mxfp4(data, |exponent, codes| {
                // Uses half of the power and doubled integers, because the power for exponent 255
                // exceeds float32.
                let scale = match exponent {
                    0 | 1 => power_of_two(exponent) * unit,
                    _ => power_of_two(exponent - 1),
                };
                let weight = |code: &u8| scale * f32::from(integers[usize::from(code & 15)]);
                out.extend(codes.iter().map(weight));
            });
        },
        pack: |data, out| {
            let [words, powers] = parts(out)?;
            let mut words = cast::<u32>(words)?.as_chunks_mut::<4>().0.iter_mut();
            let mut to = powers.iter_mut();
            mxfp4(data, |power, codes| {
                if let (Some(words), Some(to)) = (words.next(), to.next()) {
                    pack_group(4, &codes, words);
                    *to = power;
                }
            });
            match powers.contains(&u8::MAX) {
                true => Err(Misfit::Scale),
                false => Ok(()),
            }
        },
        affine: None,
    }
}

/// See [`TableBlocks`].
pub(super) const fn table<B: TableBlocks>() -> Coding {
    Coding {
        layout: B::LAYOUT,
        decode: |data, out| {
            let (integers, unit) = B::CODES.integers();
            B::groups(data, |d, scale, codes| {
                let scale = d.to_f32() * f32::from(scale) * unit;
                let weight = |code: &u8| scale * f32::from(integers[usize::from(code & 15)]);
                out.extend(codes.iter().map(weight));
            });
        },
        pack: |data, out| {
            let (words, scales, supers, per_super) = match B::LAYOUT {
                Layout::TableSuper { group, .. } => {
                    let [words, scales, supers] = parts(out)?;
                    (words, Some(cast::<i8>(scales)?), supers, 256 / group.max(1))
                }
                _ => {
                    let [words, halves] = parts(out)?;
                    (words, None, halves, 1)
                }
            };
            let mut words = cast::<u32>(words)?.iter_mut();
            let mut scales = scales.into_iter().flatten();
            let mut supers = cast::<f16>(supers)?.iter_mut();
            let mut groups = 0usize;
            B::groups(data, |d, scale, codes| {
                if groups.is_multiple_of(per_super)
                    && let Some(to) = supers.next()
                {
                    *to = d;
                }
                groups += 1;
                if let Some(to) = scales.next() {
                    *to = scale;
                }
                for (eight, word) in codes.as_chunks::<8>().0.iter().zip(&mut words) {
                    *word = pack_nibbles(eight);
                }
            });
            Ok(())
        },
        affine: None,
    }
}

/// Writes one group after another in MLX's affine form.
#[inline(always)]
fn affine_writer<'a>(
    bits: u32,
    words: &'a mut [u32],
    (scales, biases): Factors<'a>,
) -> impl FnMut(&[u8; GROUP], f32, f32) + 'a {
    let mut words = words.chunks_exact_mut(bits as usize);
    let mut factors = scales.iter_mut().zip(biases);
    move |q, scale, bias| {
        if let (Some(words), Some((s, b))) = (words.next(), factors.next()) {
            pack_group(bits, q, words);
            *s = scale;
            *b = bias;
        }
    }
}

/// `d` and `dmin` of a K block.
fn k_halves(start: &[u8; 16]) -> [f16; 2] {
    [
        half_of(part::<0, 2, 16>(start)),
        half_of(part::<2, 2, 16>(start)),
    ]
}

/// Scale and bias of the 8 groups of a K block. Products of an `f16` with small integers are exact.
fn k_factors(start: &[u8; 16]) -> [(f32, f32); 8] {
    let [d, dmin] = k_halves(start).map(f16::to_f32);
    k_scales(start).map(|(scale, min)| (d * f32::from(scale), -(dmin * f32::from(min))))
}

/// The parts as an array of length `N`.
fn parts<'a, 'b, const N: usize>(
    out: &'a mut [&'b mut [u8]],
) -> Result<&'a mut [&'b mut [u8]; N], Misfit> {
    out.try_into().map_err(|_| Misfit::Size)
}

/// Casts the bytes of a part to elements. Unaligned bytes cause an error; memory of arrays is
/// always aligned.
fn cast<T: bytemuck::Pod>(bytes: &mut [u8]) -> Result<&mut [T], Misfit> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|_| Misfit::Size)
}
