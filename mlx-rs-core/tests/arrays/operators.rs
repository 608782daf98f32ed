//! Tests the results of operators, and how a scalar's type follows the array's. An operator panics
//! with the message of the error that the method returns.

use std::panic::catch_unwind;

use mlx_rs_core::{Array, Complex32, Dtype, ErrorKind, array, bf16, f16};
use proptest::prelude::*;

fn vec(a: Array) -> Vec<i32> {
    a.astype(Dtype::Int32).unwrap().to_vec().unwrap()
}

#[test]
fn every_operator_computes_what_its_method_does() {
    let (a, b) = (array!([7, -7, 9]).unwrap(), array!([2, 3, 4]).unwrap());
    assert_eq!(vec(&a + &b), [9, -4, 13]);
    assert_eq!(vec(&a - &b), [5, -10, 5]);
    assert_eq!(vec(&a * &b), [14, -21, 36]);
    assert_eq!((&a / &b).to_vec::<f32>().unwrap(), [3.5, -7.0 / 3.0, 2.25]);
    // The remainder has the sign of the divisor, as in Python.
    assert_eq!(vec(&a % &b), [1, 2, 1]);
    assert_eq!(vec(-&a), [-7, 7, -9]);
    assert_eq!(vec(&a & &b), [7 & 2, -7 & 3, 9 & 4]);
    assert_eq!(vec(&a | &b), [7 | 2, -7 | 3, 9 | 4]);
    assert_eq!(vec(&a ^ &b), [7 ^ 2, -7 ^ 3, 9 ^ 4]);
    assert_eq!(vec(!&a), [!7, !-7, !9]);
    assert_eq!(vec(&a << &b), [28, -56, 144]);
    assert_eq!(vec(&a >> &b), [1, -1, 0]);
    // Operands by value, by reference, and mixed, with scalars on either side.
    assert_eq!(vec(a.clone() + b.clone()), vec(&a + b.clone()));
    assert_eq!(vec(a.clone() + &b), [9, -4, 13]);
    assert_eq!(vec(10 - &a), [3, 17, 1]);
    assert_eq!(vec(100i64 % b.clone()), [0, 1, 0]);
    assert_eq!(vec(1 << &b), [4, 8, 16]);
    let inverse: Array = 1.0 / b.clone();
    assert_eq!(inverse.to_vec::<f32>().unwrap(), [0.5, 1.0 / 3.0, 0.25]);
    let t = array!([true, false]).unwrap();
    assert_eq!((!&t).to_vec::<bool>().unwrap(), [false, true]);
    assert_eq!((&t & true).to_vec::<bool>().unwrap(), [true, false]);
    assert_eq!((&t ^ &t).to_vec::<bool>().unwrap(), [false, false]);
    assert_eq!((true | t).to_vec::<bool>().unwrap(), [true, true]);
}

#[test]
fn assigning_operators_leave_other_handles_alone() {
    let a = array!([1, 2]).unwrap();
    let mut b = a.clone();
    b += 1;
    b *= &a;
    b -= a.clone();
    b %= 3;
    b <<= 2usize;
    b |= 1;
    b ^= 3;
    b &= 0xff;
    b >>= 1;
    assert_eq!(
        vec(b),
        [
            ((((1 << 2) | 1) ^ 3) & 0xff) >> 1,
            ((((4 % 3) << 2) | 1) ^ 3) >> 1
        ]
    );
    let mut c = array!([1.0, 3.0]).unwrap();
    c /= 2;
    assert_eq!(c.to_vec::<f32>().unwrap(), [0.5, 1.5]);
    assert_eq!(vec(a), [1, 2]);
}

#[test]
fn scalars_take_the_type_of_the_array_as_in_python() {
    // Rows and expected values from Python mlx 0.30.6. Each row combines an array of a type with 1,
    // 1.5, True and 1j.
    use Dtype::*;
    for (dtype, int, float) in [
        (Bool, Int32, Float32),
        (Uint8, Uint8, Float32),
        (Uint16, Uint16, Float32),
        (Uint32, Uint32, Float32),
        (Uint64, Uint64, Float32),
        (Int8, Int8, Float32),
        (Int16, Int16, Float32),
        (Int32, Int32, Float32),
        (Int64, Int64, Float32),
        (Float16, Float16, Float16),
        (Bfloat16, Bfloat16, Bfloat16),
        (Float32, Float32, Float32),
        (Float64, Float64, Float64),
        (Complex64, Complex64, Complex64),
    ] {
        let a = array!([1, 0]).unwrap().astype(dtype).unwrap();
        assert_eq!((&a + 1).dtype(), int, "{dtype} + 1");
        assert_eq!((1i64 + &a).dtype(), int, "1 + {dtype}");
        assert_eq!((&a + 1u8).dtype(), int, "{dtype} + 1u8");
        assert_eq!((&a * 1usize).dtype(), int, "{dtype} * 1usize");
        assert_eq!((&a * 1.5).dtype(), float, "{dtype} * 1.5");
        assert_eq!((1.5f32 * &a).dtype(), float, "1.5 * {dtype}");
        assert_eq!((&a * f16::ONE).dtype(), float, "{dtype} * f16");
        assert_eq!((&a * bf16::ONE).dtype(), float, "{dtype} * bf16");
        assert_eq!((&a + true).dtype(), dtype, "{dtype} + true");
        let complex = (&a + Complex32::new(0.0, 1.0)).dtype();
        assert_eq!(complex, Complex64, "{dtype} + 1j");
        assert_eq!(a.scalar_like(1.5).unwrap().dtype(), float);
    }
}

#[test]
fn what_a_method_refuses_panics_with_its_message() {
    let panics = |f: &(dyn Fn() -> Array + std::panic::RefUnwindSafe)| {
        let payload = catch_unwind(f).expect_err("must panic");
        payload.downcast_ref::<String>().expect("a message").clone()
    };
    let bytes = array!([1u8, 2]).unwrap();
    let floats = array!([1.0, 2.0]).unwrap();
    let three = array!([1, 2, 3]).unwrap();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let messages = [
        panics(&|| &bytes + 300),
        panics(&|| &bytes - -1),
        panics(&|| &bytes + &three),
        panics(&|| &floats & &floats),
        panics(&|| !&floats),
        panics(&|| &floats << 1),
        panics(&|| -array!([true]).unwrap()),
    ];
    std::panic::set_hook(hook);
    for (message, part) in messages.iter().zip([
        "300 does not fit uint8",
        "-1 does not fit uint8",
        "[2]",
        "bitwise",
        "bitwise",
        "only integers can be shifted",
        "bool",
    ]) {
        assert!(message.contains(part), "{message} lacks {part}");
        assert!(message.contains("operators panic"), "{message}");
    }
    // An integer division by zero is not an error. It returns 0, as in NumPy.
    assert_eq!((&three % 0).to_vec::<i32>().unwrap(), [0; 3]);
    // The same conversion through a method returns an error.
    assert_eq!(bytes.scalar_like(300).unwrap_err().kind(), ErrorKind::Value);
}

proptest! {
    /// As in numpy, a shift by the width or more leaves no bits. The processor's own shift would
    /// reduce the count modulo the width, so a check prevents it.
    #[test]
    fn shifts_have_a_meaning_for_every_count(values in prop::collection::vec(any::<i16>(), 4), counts in prop::collection::vec(prop_oneof![-20i16..40, any::<i16>()], 4)) {
        let (a, b) = (Array::vector(&values).unwrap(), Array::vector(&counts).unwrap());
        let expected = |f: fn(i16, u32) -> Option<i16>, beyond: fn(i16) -> i16| -> Vec<i16> {
            values.iter().zip(&counts).map(|(&v, &c)| {
                u32::try_from(c).ok().and_then(|c| f(v, c)).unwrap_or(beyond(v))
            }).collect()
        };
        prop_assert_eq!((&a << &b).to_vec::<i16>().unwrap(), expected(i16::checked_shl, |_| 0));
        prop_assert_eq!((&a >> &b).to_vec::<i16>().unwrap(), expected(i16::checked_shr, |v| v >> 15));
        let unsigned: Vec<u16> = values.iter().map(|&v| v as u16).collect();
        let u = Array::vector(&unsigned).unwrap();
        let c = counts[0].unsigned_abs();
        let want: Vec<u16> = unsigned.iter().map(|v| v.checked_shr(c.into()).unwrap_or(0)).collect();
        prop_assert_eq!((&u >> c).to_vec::<u16>().unwrap(), want);
    }
}
