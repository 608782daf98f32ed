//! Converts MLX errors to errors of the public contract.

use inference::{Error, ErrorKind};

/// Converts an MLX error, with the engine's current action: `.map_err(engine("prefill"))`.
pub(crate) fn engine(doing: &'static str) -> impl Fn(mlx_rs_core::Error) -> Error {
    move |e| {
        let (kind, message) = match e.kind() {
            mlx_rs_core::ErrorKind::OutOfMemory => {
                (ErrorKind::OutOfMemory, "there is not enough memory")
            }
            _ => (ErrorKind::Engine, "MLX failed"),
        };
        Error::new(kind, message).context(doing).with_source(e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx_rs_core::Array;

    #[test]
    fn the_cause_is_chained_and_said_once() {
        use std::error::Error as _;
        let (a, b) = (
            Array::vector(&[1.0f32, 2.0]).unwrap(),
            Array::vector(&[1.0f32, 2.0, 3.0]).unwrap(),
        );
        let e = a.add(&b).map_err(engine("prefill")).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Engine);
        assert_eq!(e.to_string(), "prefill: MLX failed");
        let cause = e.source().unwrap();
        let cause = cause.downcast_ref::<mlx_rs_core::Error>().unwrap();
        assert_eq!(cause.shapes(), [[2], [3]]);
        assert_eq!(format!("{e:#}"), format!("prefill: MLX failed: {cause}"));
    }
}
