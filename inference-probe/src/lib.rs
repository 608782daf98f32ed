//! Statistics on the hidden states of a language model, in float64 and without an engine.
//!
//! | module | question |
//! |---|---|
//! | [`stimuli`] | which texts, with which labels, and at which position is a state taken? |
//! | [`activations`] | where are the states, `[stimuli, layers, width]`, as a `.npy` file? |
//! | [`files`] | how is a file written completely or not at all? |
//! | [`npy`] | how is an array of float32 written for numpy? |
//! | [`folds`] | which rows train and which test? |
//! | [`linear`] | can a linear classifier read the label from a layer ([`logistic`] regression)? |
//! | [`cca`] | which directions do two layers, or a layer and labels, share? |
//! | [`rsa`] | are the same stimuli similar in two layers? |
//! | [`divergence`] | how do predictions and group means differ from layer to layer? |
//! | [`behavior`] | does the model continue a stimulus as expected? |
//! | [`trace_store`] | what does each part of a model add, token by token, as a file? |
//! | [`window_store`] | how are a few vectors for each window of a long context stored? |
//! | [`vindex`] | what activates features of feed-forward parts, and what do they add, as files? |
//! | [`walkers`] | what do the weights alone connect: edges, circuits of heads, vectors as JSON? |
//! | [`report`] | a folder of results as one summary, charts and an HTML page |
//!
//! In every [`Matrix`], rows are stimuli and columns are elements of a hidden state.
//!
//! Without the default feature `statistics`, the crate contains only [`files`], [`trace_store`],
//! [`vindex`], [`walkers`] and [`window_store`].

#![forbid(unsafe_code)]
#![deny(missing_docs)]

#[cfg(feature = "statistics")]
pub mod activations;
#[cfg(feature = "statistics")]
pub mod behavior;
#[cfg(feature = "statistics")]
pub mod cca;
pub mod chart;
#[cfg(feature = "statistics")]
pub mod direction;
#[cfg(feature = "statistics")]
pub mod divergence;
mod error;
pub mod files;
#[cfg(feature = "statistics")]
pub mod folds;
#[cfg(feature = "statistics")]
mod lbfgs;
#[cfg(feature = "statistics")]
pub mod linear;
#[cfg(feature = "statistics")]
pub mod logistic;
#[cfg(feature = "statistics")]
pub mod npy;
#[cfg(feature = "statistics")]
pub mod report;
#[cfg(feature = "statistics")]
pub mod rsa;
#[cfg(feature = "statistics")]
pub mod stimuli;
pub mod trace_store;
pub mod vindex;
pub mod walkers;
pub mod window_store;

pub use error::{Error, Result};

/// Rows are observations, columns are features.
#[cfg(feature = "statistics")]
pub type Matrix = nalgebra::DMatrix<f64>;
