//! A crate that registers the backend `linked` when it is linked. It has no items to refer to.

#![forbid(unsafe_code)]

mod registration;
