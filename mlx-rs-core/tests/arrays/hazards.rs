//! Calls that crash or corrupt MLX must be errors in the safe API. There is one section per hazard,
//! named as in docs/safety.md.

use mlx_rs_core::{
    All, Array, Complex32, Device, Dtype, Element, ErrorKind, QuantMode, Quantized, Stream, bf16,
    concatenate, eval, f16, ones, stack, zeros,
};

fn iota(shape: &[i32]) -> Array {
    let n: i32 = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
    Array::from_slice(&values, shape).unwrap()
}

// ---- shapes are never trusted

#[test]
fn a_shape_must_hold_exactly_the_values() {
    for shape in [
        &[3][..],
        &[5],
        &[2, 3],
        &[-1],
        &[-2, -2],
        &[i32::MAX, i32::MAX],
        &[0],
        &[],
    ] {
        let e = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], shape).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape, "{shape:?}");
    }
    assert_eq!(
        Array::from_slice::<f32>(&[], &[0, 5]).unwrap().shape(),
        [0, 5]
    );
}

// ---- gathers

#[test]
fn indices_out_of_range_are_errors_or_clamped_never_read() {
    let a = iota(&[4, 2]);
    for bad in [4i64, -5, i64::from(i32::MAX), i64::MAX, i64::MIN] {
        let e = a.take(&Array::scalar(bad).unwrap(), 0).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Index, "{bad}");
    }
    let e = a.take(&Array::scalar(u64::MAX).unwrap(), 0).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Index);
    assert_eq!(a.take_ids(&[4], 0).unwrap_err().kind(), ErrorKind::Index);
    assert_eq!(
        a.take_ids(&[u32::MAX], 0).unwrap_err().kind(),
        ErrorKind::Index
    );
    let e = a.take(&Array::scalar(1.0f32).unwrap(), 0).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Dtype);
    assert_eq!(
        a.take(&Array::scalar(-1i32).unwrap(), 0)
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [6.0, 7.0]
    );

    let clamped = |ids: Array| a.take_clamped(&ids, 0).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(clamped(Array::vector(&[u32::MAX]).unwrap()), [6.0, 7.0]);
    assert_eq!(
        clamped(Array::vector(&[i32::MIN, i32::MAX]).unwrap()),
        [0.0, 1.0, 6.0, 7.0]
    );
    assert_eq!(clamped(Array::vector(&[i64::MIN]).unwrap()), [0.0, 1.0]);
    assert!(
        zeros(&[0, 2], Dtype::Float32)
            .unwrap()
            .take_clamped(&Array::scalar(0u32).unwrap(), 0)
            .is_err()
    );

    let along = Array::from_slice(&[i32::MAX, i32::MIN], &[1, 2]).unwrap();
    assert_eq!(
        a.take_along_axis(&along, 0)
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [6.0, 1.0]
    );
    let put = a
        .put_along_axis(&along, &Array::scalar(-1.0f32).unwrap(), 0)
        .unwrap();
    assert_eq!(
        put.to_vec::<f32>().unwrap(),
        [0.0, -1.0, 2.0, 3.0, 4.0, 5.0, -1.0, 7.0]
    );
    assert_eq!(a.at::<f32>(&[3, 1]).unwrap(), 7.0);
    assert_eq!(a.at::<f32>(&[4, 0]).unwrap_err().kind(), ErrorKind::Index);
}

#[test]
fn strided_views_stay_inside_the_array() {
    let a = iota(&[2, 6]);
    let view = a.as_strided(&[3, 2], &[2, 1], 1).unwrap();
    assert_eq!(
        view.to_vec::<f32>().unwrap(),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    );
    let backwards = a.as_strided(&[3], &[-1], 2).unwrap();
    assert_eq!(backwards.shape(), [3]);
    for (shape, strides, offset) in [
        (&[12][..], &[1i64][..], 1usize),
        (&[2], &[12], 0),
        (&[3], &[-1], 1),
        (&[2], &[i64::MAX], 0),
        (&[2], &[i64::MIN], 11),
        (&[1], &[1], usize::MAX),
        (&[i32::MAX, i32::MAX], &[0, 1], 0),
    ] {
        assert!(
            a.as_strided(shape, strides, offset).is_err(),
            "{shape:?} {strides:?} {offset}"
        );
    }
    assert_eq!(
        a.as_strided(&[2], &[1, 1], 0).unwrap_err().kind(),
        ErrorKind::Shape
    );
    assert_eq!(a.as_strided(&[0, 5], &[1, 1], 0).unwrap().size(), 0);
}

// ---- reading data

#[test]
fn every_kind_of_view_reads_in_row_major_order() {
    let a = iota(&[2, 3]);
    let read = |x: Array| x.to_vec::<f32>().unwrap();
    assert_eq!(read(a.transpose().unwrap()), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert_eq!(
        read(iota(&[3]).broadcast_to(&[2, 3]).unwrap()),
        [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
    );
    assert_eq!(
        read(a.slice(&[0, 1], &[2, 3], &[1, 1]).unwrap()),
        [1.0, 2.0, 4.0, 5.0]
    );
    assert_eq!(
        read(a.slice(&[0, -1], &[2, i32::MIN], &[1, -1]).unwrap()),
        [2.0, 1.0, 0.0, 5.0, 4.0, 3.0]
    );
    assert_eq!(
        read(a.slice(&[0, 0], &[2, 3], &[1, 2]).unwrap()),
        [0.0, 2.0, 3.0, 5.0]
    );
    assert_eq!(
        read(a.slice(&[1, 1], &[1, 3], &[1, 1]).unwrap()),
        Vec::<f32>::new()
    );
    assert_eq!(
        read(Array::scalar(7.0f32).unwrap().broadcast_to(&[3]).unwrap()),
        [7.0, 7.0, 7.0]
    );
    // Reads an unevaluated array twice: through a clone, and directly.
    let lazy = a.add(&a).unwrap();
    assert_eq!(read(lazy.clone()), read(lazy));
    // A borrowed view of the data keeps it alive after the source array is dropped.
    let t = { iota(&[2, 2]).transpose().unwrap() };
    let data = t.data::<f32>().unwrap();
    assert_eq!(&data[..], [0.0, 2.0, 1.0, 3.0]);
}

fn reads_only_as_itself<T: Element>(value: T) {
    let a = Array::scalar(value).unwrap();
    assert_eq!(a.item::<T>().unwrap(), value);
    fn other<U: Element>(a: &Array) {
        let answer = a.item::<U>();
        if a.dtype() == U::DTYPE {
            assert!(answer.is_ok());
        } else {
            assert_eq!(
                answer.unwrap_err().kind(),
                ErrorKind::Dtype,
                "{} as {}",
                a.dtype(),
                U::DTYPE
            );
        }
    }
    other::<bool>(&a);
    other::<u8>(&a);
    other::<u16>(&a);
    other::<u32>(&a);
    other::<u64>(&a);
    other::<i8>(&a);
    other::<i16>(&a);
    other::<i32>(&a);
    other::<i64>(&a);
    other::<f16>(&a);
    other::<f32>(&a);
    other::<f64>(&a);
    other::<bf16>(&a);
    other::<Complex32>(&a);
}

#[test]
fn items_are_never_reinterpreted_for_all_pairs_of_types() {
    reads_only_as_itself(true);
    reads_only_as_itself(200u8);
    reads_only_as_itself(60_000u16);
    reads_only_as_itself(u32::MAX);
    reads_only_as_itself(u64::MAX);
    reads_only_as_itself(-100i8);
    reads_only_as_itself(i16::MIN);
    reads_only_as_itself(i32::MIN);
    reads_only_as_itself(i64::MIN);
    reads_only_as_itself(f16::from_f32(1.5));
    reads_only_as_itself(f32::MAX);
    reads_only_as_itself(1e300f64);
    reads_only_as_itself(bf16::from_f32(-2.0));
    reads_only_as_itself(Complex32::new(1.0, -1.0));
    assert_eq!(
        iota(&[2]).item::<f32>().unwrap_err().kind(),
        ErrorKind::Shape
    );
    assert_eq!(
        Array::scalar(bf16::from_f32(0.5))
            .unwrap()
            .to_f32_vec()
            .unwrap(),
        [0.5]
    );
}

// ---- processor traps and endless loops

#[test]
fn integer_division_cannot_trap() {
    let a = Array::vector(&[i32::MIN, 7]).unwrap();
    // As in NumPy, an integer division by zero is 0. The minimum integer divided by -1 stays the
    // minimum, because its negation overflows.
    for (by, quotients) in [(0i32, [0, 0]), (-1, [i32::MIN, -7])] {
        let b = Array::scalar(by).unwrap();
        let (q, r) = a.divmod(&b).unwrap();
        assert_eq!(
            a.floor_divide(&b).unwrap().to_vec::<i32>().unwrap(),
            quotients
        );
        assert_eq!(q.to_vec::<i32>().unwrap(), quotients);
        assert_eq!(r.to_vec::<i32>().unwrap(), [0, 0]);
    }
    assert_eq!(
        a.floor_divide(&Array::scalar(2i32).unwrap())
            .unwrap()
            .to_vec::<i32>()
            .unwrap()[1],
        3
    );
    let u = Array::vector(&[7u8]).unwrap();
    let nothing = u.remainder(&Array::scalar(0u8).unwrap()).unwrap();
    assert_eq!(nothing.to_vec::<u8>().unwrap(), [0]);
    let f = Array::scalar(1.0f32)
        .unwrap()
        .floor_divide(&Array::scalar(0.0f32).unwrap())
        .unwrap();
    assert!(f.item::<f32>().unwrap().is_infinite());
    let bases = Array::vector(&[i32::MIN, -1, 0, 1, 7]).unwrap();
    let powers = bases.power(&Array::scalar(-3i32).unwrap()).unwrap();
    assert_eq!(powers.to_vec::<i32>().unwrap(), [0, -1, 0, 1, 0]);
    let p = Array::scalar(3i32)
        .unwrap()
        .power(&Array::scalar(4i32).unwrap())
        .unwrap();
    assert_eq!(p.item::<i32>().unwrap(), 81);
}

// ---- errors

#[test]
fn failures_carry_mlx_s_own_message_and_the_shapes() {
    let e = iota(&[2, 3]).matmul(&iota(&[2, 3])).unwrap_err();
    assert_eq!((e.kind(), e.op()), (ErrorKind::Mlx, "matmul"));
    assert!(e.message().contains("matmul"), "{e}");
    assert_eq!(e.shapes(), [vec![2, 3], vec![2, 3]]);
    assert!(
        !e.message().contains(".cpp"),
        "no source location of ours: {e}"
    );
}

#[test]
fn axes_that_do_not_exist_are_errors_everywhere() {
    let a = iota(&[2, 3]);
    for axis in [2, -3, i32::MAX, i32::MIN] {
        assert!(a.sum(axis, false).is_err());
        assert!(a.sum(&[0, axis], false).is_err());
        assert!(a.argmax(axis, false).is_err());
        assert!(a.softmax(axis, true).is_err());
        assert!(a.cumsum(axis, false, true).is_err());
        assert!(a.sort(axis).is_err());
        assert!(a.argsort(axis).is_err());
        assert!(a.partition(0, axis).is_err());
        assert!(a.take_ids(&[0], axis).is_err());
        assert!(
            a.take_along_axis(&Array::from_slice(&[0u32], &[1, 1]).unwrap(), axis)
                .is_err()
        );
        assert!(a.slice_axis(axis, 0, 1).is_err());
        assert!(a.swap_axes(0, axis).is_err());
        assert!(a.split(1, axis).is_err());
        assert!(a.repeat(1, axis).is_err());
        assert!(a.dim(axis).is_err());
        assert!(a.transpose_axes(&[0, axis]).is_err());
        assert!(concatenate(&[&a, &a], axis).is_err());
    }
    assert!(a.expand_dims(3).is_err());
    assert!(stack(&[&a], 3).is_err());
    assert!(a.transpose_axes(&[0, 0]).is_err());
    assert!(a.transpose_axes(&[0]).is_err());
    assert!(a.partition(3, 1).is_err());
    assert!(a.partition(-1, 1).is_err());
    assert!(a.topk(4, 1).is_err());
    assert!(a.split(2, 1).is_err());
    assert!(a.split(0, 0).is_err());
    assert!(a.repeat(-1, 0).is_err());
    assert!(a.repeat(i32::MAX, 0).is_err());
    assert!(concatenate(&[], 0).is_err());
    assert!(stack(&[], 0).is_err());
    assert!(a.update_axis(&iota(&[2, 2]), 1, 2).is_err());
    assert!(a.update_axis(&iota(&[2, 2]), 1, -1).is_err());
    assert!(a.slice(&[0], &[1], &[1]).is_err());
    assert!(a.slice(&[0, 0], &[1, 1], &[0, 1]).is_err());
    assert!(
        zeros(&[0], Dtype::Float32)
            .unwrap()
            .argmax(0, false)
            .is_err()
    );
    assert!(
        zeros(&[0], Dtype::Float32)
            .unwrap()
            .max(All, false)
            .is_err()
    );
}

#[test]
fn quantized_parts_that_lie_about_each_other_are_refused() {
    let w = iota(&[8, 64]);
    let good = Quantized::quantize(&w, 32, 4, QuantMode::Affine).unwrap();
    let x = iota(&[1, 64]);
    assert_eq!(good.matmul_transposed(&x).unwrap().shape(), [1, 8]);
    assert!(good.matmul_transposed(&iota(&[1, 63])).is_err());
    let lie = |change: &dyn Fn(&mut Quantized)| {
        let mut q = good.clone();
        change(&mut q);
        (
            q.matmul_transposed(&x).is_err(),
            q.dequantize(Dtype::Float32).is_err(),
        )
    };
    assert_eq!(lie(&|q| q.bits = 8), (true, true));
    assert_eq!(lie(&|q| q.bits = 0), (true, true));
    assert_eq!(lie(&|q| q.bits = -4), (true, true));
    assert_eq!(lie(&|q| q.group_size = 64), (true, true));
    assert_eq!(lie(&|q| q.group_size = 0), (true, true));
    assert_eq!(lie(&|q| q.biases = None), (true, true));
    assert_eq!(lie(&|q| q.mode = QuantMode::Mxfp4), (true, true));
    assert_eq!(lie(&|q| q.scales = iota(&[8, 1])), (true, true));
    assert_eq!(lie(&|q| q.scales = iota(&[7, 2])), (true, true));
    assert_eq!(lie(&|q| q.biases = Some(iota(&[8, 1]))), (true, true));
    assert_eq!(lie(&|q| q.weight = iota(&[8, 8])), (true, true));
    assert!(Quantized::quantize(&iota(&[8, 60]), 32, 4, QuantMode::Affine).is_err());
    assert!(Quantized::quantize(&w, 16, 4, QuantMode::Affine).is_err());
    let back = good.dequantize(Dtype::Float32).unwrap();
    assert!(back.all_close(&w, 0.0, 2.0).unwrap());
}

// ---- memory

#[test]
fn results_beyond_the_budget_are_refused_before_they_are_computed() {
    let one = ones(&[1], Dtype::Float32).unwrap();
    let e = one.broadcast_to(&[i32::MAX, i32::MAX]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{e}");
    let column = ones(&[1 << 20, 1], Dtype::Float32).unwrap();
    let row = ones(&[1, 1 << 20], Dtype::Float32).unwrap();
    let e = column.multiply(&row).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{e}");
    assert!(e.to_string().contains("budget"));
}

// ---- threads

#[test]
fn eight_threads_build_and_evaluate_at_once() {
    let shared = iota(&[32, 32]);
    std::thread::scope(|scope| {
        for t in 0..8 {
            let shared = &shared;
            scope.spawn(move || {
                let stream = Stream::new(Device::cpu()).unwrap();
                for i in 0..40 {
                    let x = stream.scope(|| {
                        let x = shared.matmul(shared).unwrap();
                        let x = x.add(&Array::scalar((t * i) as f32).unwrap()).unwrap();
                        x.softmax(-1, true).unwrap().sum(All, false).unwrap()
                    });
                    assert!((x.item::<f32>().unwrap() - 32.0).abs() < 1e-3);
                    let _ = shared.reshape(&[7]).unwrap_err();
                }
            });
        }
    });
}

#[test]
fn arrays_cross_threads_unevaluated_and_evaluated() {
    let lazy = iota(&[64]).square().unwrap();
    let sum = std::thread::spawn(move || lazy.sum(All, false).unwrap())
        .join()
        .unwrap();
    assert_eq!(
        sum.item::<f32>().unwrap(),
        (0..64).map(|i| (i * i) as f32).sum::<f32>()
    );
}

#[test]
fn a_panic_in_a_scope_restores_the_stream_and_the_lock() {
    let stream = Stream::new(Device::cpu()).unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.scope(|| panic!("inside"));
    }));
    assert!(caught.is_err());
    drop(stream);
    // The dropped stream must no longer be current, and the lock must be free.
    assert_eq!(
        iota(&[2]).sum(All, false).unwrap().item::<f32>().unwrap(),
        1.0
    );
}

#[test]
fn a_missing_device_is_an_error() {
    if !Device::gpu().is_available() {
        let e = Stream::new(Device::gpu()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.to_string().contains("gpu"));
    }
}

// ---- a failed evaluation

#[test]
fn an_error_leaves_later_work_correct() {
    let a = iota(&[4]);
    for _ in 0..3 {
        assert!(a.add(&iota(&[3])).is_err());
        let b = a.add(&a).unwrap();
        eval([&b]).unwrap();
        assert_eq!(b.to_vec::<f32>().unwrap(), [0.0, 2.0, 4.0, 6.0]);
    }
}
