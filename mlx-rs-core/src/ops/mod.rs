//! Operations on arrays, grouped as MLX's documentation groups them. All are lazy and run on the
//! calling thread's current stream.

mod arrange;
mod binary;
mod composed;
mod conv;
mod create;
mod dequantized;
mod einsum_path;
mod index;
pub(crate) mod mapped;
mod matrix;
mod methods;
mod pad;
mod products;
mod quantized;
mod reduce;
mod scan;
mod scatter;
mod select;
mod shape;
mod sort;
mod types;
mod unary;

pub use arrange::{GridIndexing, broadcast_arrays, concatenate_flat, depends, meshgrid};
pub(crate) use composed::frequencies;
pub use composed::{Side, bartlett, blackman, hamming, hanning};
pub use conv::Conv;
pub use create::{arange, eye, full, identity, linspace, ones, tri, zeros};
pub use pad::Pad;
pub use products::{IndexArg, MatrixIndices, einsum};
pub use quantized::{QuantMode, Quantized};
pub use reduce::{All, Axes};
pub use scatter::ScatterMode;
pub use select::where_;
pub use shape::{concatenate, stack};
pub(crate) use types::align_of_items;
