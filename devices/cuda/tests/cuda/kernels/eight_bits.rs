//! Casts to 8 bits, and products of the results.

use catalog::DType;
use cuda_device::launcher::Float8;
use cuda_device::{Device, Lies, Matrix8, Tensor};
use half::bf16;

use super::{random, read, upload, within};
use crate::emulator::{self, decoded};

const FORMATS: [(Float8, f64); 2] = [(Float8::E4m3, 448.0), (Float8::E5m2, 57344.0)];

/// The code of a finite number: the nearest of all codes' numbers; of two as near, the even code.
fn encoded(format: Float8, x: f64) -> u8 {
    let finite = (0..=0x7Fu8).filter(|&code| decoded(format, code).is_finite());
    let distance = |code: u8| (decoded(format, code) - x.abs()).abs();
    let nearest = finite.min_by(|&a, &b| {
        let near = distance(a).total_cmp(&distance(b));
        near.then_with(|| (a & 1).cmp(&(b & 1)))
    });
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    nearest.expect("there are codes") | sign
}

fn codes(device: &Device, codes: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; codes.len()];
    let launcher = &device.launcher;
    launcher
        .read(codes.address(), &mut bytes)
        .expect("work before succeeded");
    launcher.synchronize().expect("nothing failed");
    bytes
}

/// A matrix in 8 bits as numbers in 64 bits, by rows.
fn numbers(device: &Device, format: Float8, x: &Matrix8) -> Vec<f64> {
    let factor = read(device, &x.factor)[0];
    let rows = codes(device, x.rows.as_ref().expect("lies by rows"));
    rows.iter()
        .map(|&code| decoded(format, code) * factor)
        .collect()
}

#[test]
fn codes_are_those_of_the_formats() {
    for (format, most) in FORMATS {
        let [smallest, one] = match format {
            Float8::E4m3 => [2f64.powi(-9), 0x38.into()],
            Float8::E5m2 => [2f64.powi(-16), 0x3C.into()],
        };
        assert_eq!(decoded(format, 1), smallest);
        assert_eq!(f64::from(encoded(format, 1.0)), one);
        let all: Vec<f64> = (0..=0x7F).map(|code| decoded(format, code)).collect();
        let finite = all.iter().copied().filter(|x| x.is_finite());
        assert_eq!(finite.fold(0.0, f64::max), most);
        // Codes are in the order of their numbers.
        assert!(all.windows(2).all(|w| w[0] < w[1] || !w[1].is_finite()));
    }
}

#[test]
fn every_number_in_bf16_is_cast_to_its_nearest() {
    for device in emulator::devices() {
        for (format, most) in FORMATS {
            // The largest number is the format's, so the scale is 1; what would be larger is no number.
            let every: Vec<bf16> = (0..=u16::MAX)
                .map(bf16::from_bits)
                .map(|x| {
                    if x.to_f64().abs() > most {
                        bf16::NAN
                    } else {
                        x
                    }
                })
                .collect();
            let data = every.iter().map(|x| x.to_f32()).collect();
            let (x, _) = upload(&device, &[256, 256], data, DType::Bf16);
            let got = device.cast8(&x, format, Lies::Rows).expect("runs");
            assert_eq!(read(&device, &got.factor), [1.0]);
            let got = codes(&device, got.rows.as_ref().expect("was asked for"));
            let mut seen = [false; 256];
            for (x, &got) in every.iter().zip(&got) {
                let want = match x.is_nan() {
                    true => 0x7F,
                    false => encoded(format, x.to_f64()),
                };
                assert_eq!(got, want, "{format:?} {x}");
                seen[got as usize] = true;
            }
            let expected = |code: u8| code == 0x7F || decoded(format, code).is_finite();
            for code in 0..=u8::MAX {
                assert_eq!(seen[code as usize], expected(code), "{format:?} {code:#x}");
            }
        }
    }
}

#[test]
fn casts_are_scaled_by_the_largest_and_lie_both_ways() {
    for device in emulator::devices() {
        for [rows, columns] in [[16, 16], [48, 80], [128, 64], [272, 208]] {
            for (format, most) in FORMATS {
                for size in [0.0, 3e-6, 1.0, 1e5] {
                    let what = format!("{rows} × {columns} {format:?} {size}");
                    let mut data = vec![0.0; rows * columns];
                    dtensor::philox::Stream::new(30, 0, "eight").normals(0, &mut data);
                    data.iter_mut().for_each(|x| *x *= size);
                    let (x, wide) = upload(&device, &[rows, columns], data, DType::Bf16);
                    let got = device.cast8(&x, format, Lies::Both).expect("runs");
                    let largest = wide.iter().fold(1e-12f32, |m, x| m.max(x.abs() as f32));
                    let scale = most as f32 / largest;
                    let factor = read(&device, &got.factor)[0];
                    // One rounding of either division apart.
                    let relative = factor * f64::from(scale) - 1.0;
                    assert!(relative.abs() < 3e-7, "{what}: {factor} {scale}");
                    let by_rows = codes(&device, got.rows.as_ref().expect("was asked for"));
                    let by_columns = codes(&device, got.columns.as_ref().expect("was asked for"));
                    for (i, &code) in by_rows.iter().enumerate() {
                        let other = by_columns[i % columns * rows + i / columns];
                        assert_eq!(code, other, "{what}: {i}");
                        let want = encoded(format, f64::from(wide[i] as f32 * scale));
                        assert_eq!(code, want, "{what}: {i}");
                    }
                    for ways in [Lies::Rows, Lies::Columns] {
                        let one = device.cast8(&x, format, ways).expect("runs");
                        assert!(one.lies(ways) && !one.lies(Lies::Both));
                        for (one, all) in [(&one.rows, &by_rows), (&one.columns, &by_columns)] {
                            let same = |one| codes(&device, one) == *all;
                            assert!(one.as_ref().is_none_or(same), "{what} {ways:?}");
                        }
                    }
                }
            }
        }
        assert_eq!(device.memory.usage().live, 0);
    }
}

#[test]
fn products_in_8_bits_add_up_in_32() {
    for device in emulator::devices() {
        for [m, n, k] in [[16, 16, 16], [48, 32, 80], [64, 144, 128]] {
            let what = format!("{m} × {n} × {k}");
            let (x, wx) = random(&device, &[m, k], DType::Bf16, 40);
            let (w, ww) = random(&device, &[n, k], DType::Bf16, 41);
            let (dy, wd) = random(&device, &[m, n], DType::Bf16, 42);
            let (bias, wb) = random(&device, &[n], DType::Bf16, 43);
            let (gradient, before) = random(&device, &[n, k], DType::F32, 44);
            let cast = |x, format| device.cast8(x, format, Lies::Both).expect("runs");
            let (x8, w8) = (cast(&x, Float8::E4m3), cast(&w, Float8::E4m3));
            let dy8 = cast(&dy, Float8::E5m2);
            let y = device
                .linear8(&x8, &w8, Some(&bias), vec![m, n])
                .expect("runs");
            let dx = device
                .linear_backward8(&dy8, &w8, vec![m, k])
                .expect("runs");
            device
                .add_linear_gradient8(&gradient, &dy8, &x8)
                .expect("runs");
            let rounded = [
                numbers(&device, Float8::E4m3, &x8),
                numbers(&device, Float8::E4m3, &w8),
                numbers(&device, Float8::E5m2, &dy8),
            ];
            // Of what was cast: results are rounded once, gradients of weights not at all, but Hopper's matrix units keep
            // about 14 bits of a sum of products in 8 bits (DeepSeek-V3, arXiv:2412.19437, section 3.5.2; an H200 was 3e-5
            // off). Of what was there
            // before the casts: 4 and 3 bits of mantissa round a number by 1/16 and 1/8 at most, which is
            // 0.026 and 0.052 of the norm; two operands' add up by squares.
            let exact = [3e-3, 3e-3, 1e-4];
            let before_casts = [0.06, 0.09, 0.09];
            for (of_casts, [a, b, d]) in [
                (true, [&rounded[0], &rounded[1], &rounded[2]]),
                (false, [&wx, &ww, &wd]),
            ] {
                let [mut wy, wdx, mut wdw] = super::products::linear([m, n, k], a, b, d);
                for (i, y) in wy.iter_mut().enumerate() {
                    *y += wb[i % n];
                }
                for (dw, before) in wdw.iter_mut().zip(&before) {
                    *dw += before;
                }
                let pairs = [(&y, wy), (&dx, wdx), (&gradient, wdw)];
                for (i, (got, want)) in pairs.into_iter().enumerate() {
                    let bound = if of_casts { exact[i] } else { before_casts[i] };
                    within(
                        &device,
                        &format!("{what} {i} {of_casts}"),
                        got,
                        &want,
                        bound,
                    );
                }
            }
        }
    }
}

#[test]
fn sizes_that_no_product_takes_are_refused() {
    for device in emulator::devices() {
        for (shape, dtype) in [
            ([16, 24], DType::Bf16),
            ([15, 32], DType::Bf16),
            ([16, 16], DType::F32),
        ] {
            let (x, _) = random(&device, &shape, dtype, 50);
            let error = device
                .cast8(&x, Float8::E4m3, Lies::Rows)
                .expect_err("refused");
            assert!(error.to_string().contains("multiples of 16"), "{error}");
        }
        let (x, _) = random(&device, &[16, 16], DType::Bf16, 51);
        let rows = device.cast8(&x, Float8::E4m3, Lies::Rows).expect("runs");
        let gradient = device.zeros(vec![16, 16], DType::F32).expect("memory");
        let error = device.add_linear_gradient8(&gradient, &rows, &rows);
        let error = error.expect_err("refused").to_string();
        assert!(error.contains("along the contracted dim"), "{error}");
    }
}
