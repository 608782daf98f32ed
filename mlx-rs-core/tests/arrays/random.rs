//! Random numbers must equal Python's for the same key (values from `mlx` 0.30.6 on a CPU) and stay
//! within their limits. An empty interval must be an error.

use mlx_rs_core::random::{self, Key, Keys};
use mlx_rs_core::{All, Array, Dtype, ErrorKind, zeros};
use proptest::prelude::*;

const F32: Dtype = Dtype::Float32;

fn key() -> Key {
    Key::new(42).unwrap()
}

fn close(got: &Array, expected: &[f32]) {
    let got = got.to_vec::<f32>().unwrap();
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() < 2e-5, "{got:?} is not {expected:?}");
    }
}

#[test]
fn the_numbers_are_those_of_python() {
    let mut keys = Keys::new(7).unwrap();
    let k = keys.next_key().unwrap();
    close(
        &random::normal(0.0, 1.0, &[2], F32, &k).unwrap(),
        &[0.037024, -1.4152935],
    );
    let k = keys.next_key().unwrap();
    close(
        &random::uniform(0.0, 1.0, &[2], F32, &k).unwrap(),
        &[0.8012937, 0.1844296],
    );

    let k = key();
    let one = |v: f32| Array::scalar(v).unwrap();
    close(
        &random::uniform(-1.0, 3.0, &[3], F32, &k).unwrap(),
        &[1.2965777, -0.599367, -0.7621553],
    );
    let normal = [1.3738713, -1.5613005, -2.1186254];
    close(&random::normal(1.0, 2.0, &[3], F32, &k).unwrap(), &normal);
    let with = random::normal_with(Some(&one(1.0)), Some(&one(2.0)), &[3], F32, &k).unwrap();
    close(&with, &normal);
    close(
        &random::laplace(1.0, 2.0, &[3], F32, &k).unwrap(),
        &[0.6789842, 4.2157125, 5.258_568],
    );
    close(
        &random::gumbel(&[3], F32, &k).unwrap(),
        &[0.5890137, -0.8333455, -1.0375987],
    );
    close(
        &random::truncated_normal(&one(-1.0), &one(1.0), &[3], F32, &k).unwrap(),
        &[0.1272219, -0.7486562, -0.8443075],
    );
    let mean = Array::vector(&[1.0f32, 2.0]).unwrap();
    let covariance = Array::from_slice(&[2.0f32, 0.5, 0.5, 1.0], &[2, 2]).unwrap();
    close(
        &random::multivariate_normal(&mean, &covariance, &[2], &k).unwrap(),
        &[1.485603, 3.0808167, -1.5037258, 0.1709546],
    );

    let words = |k: &Key| k.array().to_vec::<u32>().unwrap();
    let (first, second) = k.split().unwrap();
    assert_eq!(words(&first), [2465931498, 3679230171]);
    assert_eq!(words(&second), [255383827, 267815257]);
    let three = k.split_into(3).unwrap();
    assert_eq!(words(&three[0]), [3134548294, 3733159049]);
    assert_eq!(words(&three[2]), [801545058, 2363201431]);
    assert!(k.split_into(0).unwrap().is_empty());

    let again = Key::from_array(first.array().clone()).unwrap();
    assert_eq!(words(&again), words(&first));
    for other in [
        Array::vector(&[1u32, 2, 3]).unwrap(),
        Array::vector(&[1i32, 2]).unwrap(),
        Array::scalar(1u32).unwrap(),
    ] {
        let error = Key::from_array(other).unwrap_err();
        assert!(error.to_string().contains("two words of uint32"), "{error}");
    }

    let drawn = random::randint(3, 90, &[5], Dtype::Int32, &k).unwrap();
    assert_eq!(drawn.to_vec::<i32>().unwrap(), [66, 78, 20, 21, 19]);
    let coins = random::bernoulli(&one(0.3), &[8], &k).unwrap();
    let expected = [false, false, true, true, false, true, true, true];
    assert_eq!(coins.to_vec::<bool>().unwrap(), expected);

    let logits = Array::from_slice(&[0.0f32, 1.0, 2.0, 3.0, 0.0, 0.0], &[2, 3]).unwrap();
    let of = |a: mlx_rs_core::Result<Array>| a.unwrap().to_vec::<u32>().unwrap();
    assert_eq!(of(random::categorical(&logits, -1, &k)), [2, 0]);
    let samples = random::categorical_samples(&logits, -1, 4, &k);
    assert_eq!(of(samples), [2, 2, 0, 2, 0, 0, 0, 0]);
    let shaped = random::categorical_shaped(&logits, -1, &[3, 2], &k);
    assert_eq!(of(shaped), [2, 0, 1, 0, 2, 0]);
    assert_eq!(of(random::permutation_of(6, &k)), [4, 3, 5, 0, 1, 2]);
    let grid = Array::from_slice(&[0u32, 1, 2, 3, 4, 5], &[2, 3]).unwrap();
    assert_eq!(of(random::permutation(&grid, 1, &k)), [2, 1, 0, 5, 4, 3]);
}

#[test]
fn what_cannot_be_drawn_is_refused() {
    let k = key();
    let one = Array::scalar(1.0f32).unwrap();
    let empty = zeros(&[2, 0], F32).unwrap();
    let row = Array::vector(&[1.0f32, 2.0]).unwrap();
    let shape = [i32::MAX, i32::MAX, i32::MAX];
    for s in [&[-1][..], &shape[..]] {
        assert!(random::uniform(0.0, 1.0, s, F32, &k).is_err());
        assert!(random::normal(0.0, 1.0, s, F32, &k).is_err());
        assert!(random::normal_with(None, None, s, F32, &k).is_err());
        assert!(random::laplace(0.0, 1.0, s, F32, &k).is_err());
        assert!(random::gumbel(s, F32, &k).is_err());
        assert!(random::truncated_normal(&one, &one, s, F32, &k).is_err());
        assert!(random::bernoulli(&one, s, &k).is_err());
        assert!(random::bits(s, 4, &k).is_err());
        assert!(random::randint(0, 2, s, Dtype::Int32, &k).is_err());
        assert!(random::categorical_shaped(&row, 0, s, &k).is_err());
        assert!(random::multivariate_normal(&row, &row, s, &k).is_err());
    }
    for dtype in [Dtype::Int32, Dtype::Bool] {
        assert_eq!(
            random::uniform(0.0, 1.0, &[1], dtype, &k)
                .unwrap_err()
                .kind(),
            ErrorKind::Dtype
        );
        assert!(random::laplace(0.0, 1.0, &[1], dtype, &k).is_err());
    }
    // MLX cannot draw doubles.
    assert!(random::uniform(0.0, 1.0, &[1], Dtype::Float64, &k).is_err());
    for width in [0, 3, 8, -1, i32::MAX] {
        assert!(random::bits(&[2], width, &k).is_err());
    }
    assert!(random::randint(0, 2, &[1], F32, &k).is_err());
    assert!(random::randint(3, 3, &[1], Dtype::Int32, &k).is_err());
    assert!(random::randint(0, 257, &[1], Dtype::Uint8, &k).is_err());
    assert!(random::randint(-1, 2, &[1], Dtype::Uint64, &k).is_err());
    assert!(random::randint(i64::MIN, 0, &[1], Dtype::Int32, &k).is_err());
    assert!(random::bernoulli(&row, &[3], &k).is_err());
    assert!(random::bernoulli(&Array::scalar(1i32).unwrap(), &[3], &k).is_err());
    for axis in [1, 2, -3, i32::MIN, i32::MAX] {
        assert!(random::categorical(&empty, axis, &k).is_err(), "{axis}");
        assert!(random::categorical_samples(&empty, axis, 1, &k).is_err());
    }
    assert!(random::categorical_samples(&row, 0, -1, &k).is_err());
    assert!(random::categorical_shaped(&zeros(&[3, 2], F32).unwrap(), 1, &[2], &k).is_err());
    assert!(random::permutation(&row, 1, &k).is_err());
    assert!(random::permutation_of(-1, &k).is_err());
    assert!(random::normal_with(Some(&row), None, &[1], F32, &k).is_err());
    assert!(k.split_into(-1).is_err());
    let square = zeros(&[2, 2], F32).unwrap();
    assert!(random::multivariate_normal(&one, &square, &[], &k).is_err());
    assert!(random::multivariate_normal(&row, &zeros(&[3, 3], F32).unwrap(), &[], &k).is_err());
    let bad = Array::from_slice(&[f32::NAN; 4], &[2, 2]).unwrap();
    let drawn = random::multivariate_normal(&row, &bad, &[3], &k).unwrap();
    assert!(drawn.to_vec::<f32>().unwrap().iter().all(|v| v.is_nan()));
}

#[test]
fn moments_are_those_of_the_distribution() {
    let k = key();
    let n = [20_000];
    let moments = |a: Array| {
        let mean = a.mean(All, false).unwrap().item::<f32>().unwrap();
        (mean, a.std(All, false, 0).unwrap().item::<f32>().unwrap())
    };
    let near = |(m, s): (f32, f32), mean: f32, std: f32| {
        assert!(
            (m - mean).abs() < 0.1 && (s - std).abs() < 0.1,
            "{m} {s}, not {mean} {std}"
        );
    };
    near(
        moments(random::uniform(0.0, 6.0, &n, F32, &k).unwrap()),
        3.0,
        6.0 / 12f32.sqrt(),
    );
    near(
        moments(random::normal(2.0, 3.0, &n, F32, &k).unwrap()),
        2.0,
        3.0,
    );
    near(
        moments(random::laplace(0.0, 1.0, &n, F32, &k).unwrap()),
        0.0,
        2f32.sqrt(),
    );
    near(
        moments(random::gumbel(&n, F32, &k).unwrap()),
        0.5772,
        1.2825,
    );
    let complex = random::normal_with(None, None, &n, Dtype::Complex64, &k).unwrap();
    near(moments(complex.real().unwrap()), 0.0, 0.5f32.sqrt());
    let dice = random::randint(1, 7, &n, Dtype::Uint8, &k).unwrap();
    near(
        moments(dice.astype(F32).unwrap()),
        3.5,
        (35f32 / 12.0).sqrt(),
    );
    let wide = random::randint(-(1 << 40), 1 << 40, &n, Dtype::Int64, &k).unwrap();
    let scaled = wide
        .astype(F32)
        .unwrap()
        .divide(&Array::scalar((1i64 << 40) as f32).unwrap());
    near(moments(scaled.unwrap()), 0.0, 1.0 / 3f32.sqrt());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn integers_stay_in_their_interval(
        a in prop_oneof![any::<i64>(), -100i64..100, Just(i64::MIN), Just(i64::MAX), Just(1 << 24)],
        b in prop_oneof![any::<i64>(), -100i64..100, Just(i64::MIN), Just(i64::MAX), Just(1 << 24)],
        seed in any::<u64>(),
    ) {
        let (low, high) = (a.min(b), a.max(b));
        let k = Key::new(seed).unwrap();
        for dtype in Dtype::ALL {
            let Ok(drawn) = random::randint(low, high, &[64], dtype, &k) else { continue };
            prop_assert!(low < high && dtype.is_integer());
            if dtype == Dtype::Uint64 {
                let v = drawn.to_vec::<u64>().unwrap();
                prop_assert!(v.iter().all(|&v| (low as u64..high as u64).contains(&v)));
            } else {
                let v = drawn.astype(Dtype::Int64).unwrap().to_vec::<i64>().unwrap();
                prop_assert!(v.iter().all(|v| (low..high).contains(v)), "{low} {high} {dtype} {v:?}");
            }
        }
    }

    #[test]
    fn a_permutation_keeps_every_element(n in 0i32..50, seed in any::<u64>()) {
        let k = Key::new(seed).unwrap();
        let mut order = random::permutation_of(n, &k).unwrap().to_vec::<u32>().unwrap();
        order.sort_unstable();
        prop_assert!(order.into_iter().eq(0..n as u32));
        let a = Array::vector(&(0..n).collect::<Vec<i32>>()).unwrap();
        let mut values = random::permutation(&a, 0, &k).unwrap().to_vec::<i32>().unwrap();
        values.sort_unstable();
        prop_assert!(values.into_iter().eq(0..n));
    }
}
