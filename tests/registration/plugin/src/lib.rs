//! A crate that contributes the backend `linked` by being linked, and has nothing else that could
//! be referred to.

#![forbid(unsafe_code)]

mod registration;
