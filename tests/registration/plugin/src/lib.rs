//! A crate that registers the backend `linked` as soon as it is linked. It exports no items.

#![forbid(unsafe_code)]

mod registration;
