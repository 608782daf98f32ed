//! Tests linear algebra. The product of the factors must be the input, and no matrix may abort the
//! process.

use mlx_rs_core::linalg::{self, Norm, Triangle};
use mlx_rs_core::{All, Array, Dtype, ErrorKind, eye, ones, zeros};
use proptest::prelude::*;

fn matrix(values: &[f32], shape: &[i32]) -> Array {
    Array::from_slice(values, shape).unwrap()
}

fn close(a: &Array, b: &Array) -> bool {
    a.shape() == b.shape() && a.all_close(b, 1e-3, 1e-3).unwrap()
}

fn all_nan(a: &Array) -> bool {
    a.is_nan().unwrap().all(All, false).unwrap().item().unwrap()
}

fn none_nan(a: &Array) -> bool {
    !a.is_nan()
        .unwrap()
        .any(All, false)
        .unwrap()
        .item::<bool>()
        .unwrap()
}

/// A batch of two matrices: `bad`, and then a regular one.
fn beside_sound(bad: &[f32; 4]) -> Array {
    let mut values = bad.to_vec();
    values.extend([4.0, 1.0, 1.0, 3.0]);
    matrix(&values, &[2, 2, 2])
}

fn part(a: &Array, i: i32) -> Array {
    a.slice_axis(0, i, i + 1).unwrap()
}

#[test]
fn a_bad_matrix_is_nan_and_harms_no_other() {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    let vectors = ones(&[2, 2, 1], Dtype::Float32).unwrap();
    for bad in [
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 2.0, 2.0, 4.0],
        [nan, 0.0, 0.0, 1.0],
        [inf, 0.0, 0.0, 1.0],
        [0.1, 0.2, 0.3, 0.6],
    ] {
        let a = beside_sound(&bad);
        for x in [linalg::inv(&a), linalg::solve(&a, &vectors)] {
            let x = x.unwrap();
            assert!(all_nan(&part(&x, 0)), "{bad:?}");
            assert!(none_nan(&part(&x, 1)), "{bad:?}");
        }
    }
    // A triangular matrix is singular only if its diagonal contains zero or NaN.
    let a = beside_sound(&[0.0, 5.0, 5.0, 1.0]);
    for upper in [false, true] {
        for x in [
            linalg::tri_inv(&a, upper),
            linalg::cholesky_inv(&a, upper),
            linalg::solve_triangular(&a, &vectors, upper),
        ] {
            let x = x.unwrap();
            assert!(all_nan(&part(&x, 0)) && none_nan(&part(&x, 1)));
        }
    }
    // These matrices are not positive definite.
    for bad in [[1.0, 2.0, 2.0, 1.0], [-1.0, 0.0, 0.0, 1.0], [nan; 4]] {
        for upper in [false, true] {
            let x = linalg::cholesky(&beside_sound(&bad), upper).unwrap();
            assert!(all_nan(&part(&x, 0)) && none_nan(&part(&x, 1)));
        }
    }
    // The iterations of these calls would not converge.
    for bad in [[nan, 0.0, 0.0, 1.0], [0.0, inf, inf, 0.0], [-inf; 4]] {
        let a = beside_sound(&bad);
        let (values, vectors) = linalg::eigh(&a, Triangle::Lower).unwrap();
        let (u, s, vt) = linalg::svd(&a).unwrap();
        let mut results = vec![values, vectors, u, s, vt];
        results.push(linalg::eigvalsh(&a, Triangle::Upper).unwrap());
        results.push(linalg::singular_values(&a).unwrap());
        results.push(linalg::pinv(&a).unwrap());
        let (values, vectors) = linalg::eig(&a).unwrap();
        results.extend([values, vectors, linalg::eigvals(&a).unwrap()].map(|c| c.real().unwrap()));
        for x in results {
            assert!(all_nan(&part(&x, 0)) && none_nan(&part(&x, 1)), "{bad:?}");
        }
        // These calls succeed, because they compute with the given values.
        linalg::qr(&a).unwrap().1.eval().unwrap();
        linalg::lu(&a).unwrap().2.eval().unwrap();
    }
}

#[test]
fn scaling_is_not_singularity() {
    let a = matrix(&[1e-12, 0.0, 0.0, 1e9], &[2, 2]);
    let product = linalg::inv(&a).unwrap().matmul(&a).unwrap();
    assert!(close(&product, &eye(2, 2, 0, Dtype::Float32).unwrap()));
}

#[test]
fn what_is_no_matrix_is_refused() {
    let vector = Array::vector(&[1.0f32, 2.0]).unwrap();
    let wide = zeros(&[2, 3], Dtype::Float32).unwrap();
    let empty = zeros(&[0, 0], Dtype::Float32).unwrap();
    let integers = zeros(&[2, 2], Dtype::Int32).unwrap();
    let half = zeros(&[2, 2], Dtype::Float16).unwrap();
    type Unary = fn(&Array) -> mlx_rs_core::Result<Array>;
    let functions: [Unary; 9] = [
        linalg::inv,
        linalg::pinv,
        linalg::eigvals,
        |a| linalg::cholesky(a, false),
        |a| linalg::cholesky_inv(a, false),
        |a| linalg::tri_inv(a, true),
        |a| linalg::eigvalsh(a, Triangle::Lower),
        |a| linalg::solve(a, a),
        linalg::singular_values,
    ];
    for (i, f) in functions.iter().enumerate() {
        assert_eq!(f(&vector).unwrap_err().kind(), ErrorKind::Shape, "{i}");
        assert_eq!(f(&empty).unwrap_err().kind(), ErrorKind::Shape, "{i}");
        assert_eq!(f(&integers).unwrap_err().kind(), ErrorKind::Dtype, "{i}");
        assert_eq!(f(&half).unwrap_err().kind(), ErrorKind::Dtype, "{i}");
        let rectangular = [1, 8].contains(&i);
        assert_eq!(f(&wide).is_ok(), rectangular, "{i}");
    }
    assert!(linalg::qr(&vector).is_err() && linalg::lu(&empty).is_err());
    let a = eye(2, 2, 0, Dtype::Float32).unwrap();
    let long = Array::vector(&[1.0f32; 3]).unwrap();
    assert_eq!(
        linalg::solve(&a, &long).unwrap_err().kind(),
        ErrorKind::Shape
    );
    assert!(linalg::solve_triangular(&a, &wide.swap_axes(0, 1).unwrap(), true).is_err());
    let double = zeros(&[2], Dtype::Float64).unwrap();
    assert_eq!(
        linalg::solve(&a, &double).unwrap_err().kind(),
        ErrorKind::Dtype
    );
}

#[test]
fn norms_of_matrices_that_mlx_lacks() {
    let a = matrix(&[3.0, 0.0, 0.0, -4.0], &[2, 2]);
    let of = |n| {
        linalg::norm(&a, n, All, false)
            .unwrap()
            .item::<f32>()
            .unwrap()
    };
    assert!((of(Norm::P(2.0)) - 4.0).abs() < 1e-5);
    assert!((of(Norm::P(-2.0)) - 3.0).abs() < 1e-5);
    assert!((of(Norm::Nuclear) - 7.0).abs() < 1e-5);
    assert!((of(Norm::Frobenius) - 5.0).abs() < 1e-5);
    assert!((of(Norm::L2) - 5.0).abs() < 1e-5);
    let keepdims = linalg::norm(&a, Norm::Nuclear, &[1, 0], true).unwrap();
    assert_eq!(keepdims.shape(), [1, 1]);
    assert!(linalg::norm(&a, Norm::P(3.0), All, false).is_err());
    assert!(linalg::norm(&a, Norm::P(f64::NAN), 0, false).is_err());
    assert!(linalg::norm(&a, Norm::Frobenius, 0, false).is_err());
    assert!(linalg::norm(&a, Norm::L2, &[0, 0], false).is_err());
    assert!(linalg::norm(&a, Norm::L2, 2, false).is_err());
    let cube = ones(&[2, 2, 2], Dtype::Float32).unwrap();
    let vector_norm = linalg::norm(&cube, Norm::L2, All, true).unwrap();
    assert_eq!(vector_norm.shape(), [1, 1, 1]);
    assert!((vector_norm.item::<f32>().unwrap() - 8f32.sqrt()).abs() < 1e-6);
    assert!(linalg::norm(&cube, Norm::P(1.0), All, false).is_err());
}

#[test]
fn the_cross_product_checks_its_axis() {
    let three = Array::vector(&[1.0f32, 2.0, 3.0]).unwrap();
    let one = Array::vector(&[1.0f32]).unwrap();
    let rows = ones(&[3, 3], Dtype::Float32).unwrap();
    assert!(linalg::cross(&three, &one, 0).is_err());
    assert!(linalg::cross(&three, &three, 1).is_err());
    assert!(linalg::cross(&three, &three, i32::MIN).is_err());
    assert_eq!(
        linalg::cross(&rows, &three, 0).unwrap_err().kind(),
        ErrorKind::Index
    );
    assert_eq!(linalg::cross(&rows, &three, -1).unwrap().shape(), [3, 3]);
    assert_eq!(
        linalg::cross(&three, &three, -1)
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [0.0; 3]
    );
}

fn matrices() -> impl Strategy<Value = (i32, i32, i32, Vec<f32>)> {
    (1i32..3, 1i32..6, 1i32..6).prop_flat_map(|(b, m, n)| {
        let count = (b * m * n) as usize;
        (
            Just(b),
            Just(m),
            Just(n),
            prop::collection::vec(-4i32..5, count),
        )
            .prop_map(|(b, m, n, v)| (b, m, n, v.into_iter().map(|v| v as f32).collect()))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn factors_multiply_back((b, m, n, values) in matrices()) {
        // Many matrices of small integers are singular.
        let a = matrix(&values, &[b, m, n]);
        let (q, r) = linalg::qr(&a).unwrap();
        prop_assert!(close(&q.matmul(&r).unwrap(), &a));
        let (rows, l, u) = linalg::lu(&a).unwrap();
        let index = rows.expand_dims(-1).unwrap().broadcast_to(&[b, m, n]).unwrap();
        let product = l.matmul(&u).unwrap().take_along_axis(&index, -2).unwrap();
        prop_assert!(close(&product, &a));
        let (u, s, vt) = linalg::svd(&a).unwrap();
        let k = m.min(n);
        let u = u.slice_axis(-1, 0, k).unwrap();
        let vt = vt.slice_axis(-2, 0, k).unwrap();
        let product = u.multiply(&s.expand_dims(-2).unwrap()).unwrap().matmul(&vt).unwrap();
        prop_assert!(close(&product, &a));
        let p = linalg::pinv(&a).unwrap();
        prop_assert!(close(&a.matmul(&p).unwrap().matmul(&a).unwrap(), &a));
    }

    #[test]
    fn symmetric_matrices_decompose((b, m, n, values) in matrices()) {
        let a = matrix(&values, &[b, m, n]);
        let gram = a.matmul(&a.swap_axes(-1, -2).unwrap()).unwrap();
        let spread = gram.add(&eye(m, m, 0, Dtype::Float32).unwrap()).unwrap();
        let (values, vectors) = linalg::eigh(&gram, Triangle::Lower).unwrap();
        let scaled = vectors.multiply(&values.expand_dims(-2).unwrap()).unwrap();
        prop_assert!(close(&scaled.matmul(&vectors.swap_axes(-1, -2).unwrap()).unwrap(), &gram));
        for upper in [false, true] {
            let f = linalg::cholesky(&spread, upper).unwrap();
            let t = f.swap_axes(-1, -2).unwrap();
            let product = if upper { t.matmul(&f) } else { f.matmul(&t) }.unwrap();
            prop_assert!(close(&product, &spread));
            let unit = linalg::cholesky_inv(&f, upper).unwrap().matmul(&spread).unwrap();
            let identity = eye(m, m, 0, Dtype::Float32).unwrap();
            prop_assert!(close(&unit, &identity.broadcast_to(&[b, m, m]).unwrap()));
        }
        let x = linalg::solve(&spread, &a).unwrap();
        prop_assert!(close(&spread.matmul(&x).unwrap(), &a));
        let x = linalg::inv(&spread).unwrap().matmul(&a).unwrap();
        prop_assert!(close(&spread.matmul(&x).unwrap(), &a));
    }
}
