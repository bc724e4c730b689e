//! Matrix products: a library's GEMM in fast mode, our own over the canonical tree in exact mode.

use std::ops::Range;

use super::tree::TreeSum;

/// A view of a matrix with strides for rows and columns.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    data: &'a [f32],
    pub(super) rows: usize,
    pub(super) columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix whose rows are `stride` apart.
    pub(super) fn new(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        assert!(rows == 0 || columns == 0 || (rows - 1) * stride + columns <= data.len());
        Self {
            data,
            rows,
            columns,
            row_stride: stride,
            column_stride: 1,
        }
    }

    /// The transpose, without moving data.
    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.data[row * self.row_stride + column * self.column_stride]
    }
}

/// `out += a · b` with `out: [a.rows, b.columns]`, rows `stride` apart.
#[allow(
    unsafe_code,
    reason = "the library takes pointers; the asserts bound what it touches"
)]
pub(super) fn multiply_add(
    a: Matrix<'_>,
    b: Matrix<'_>,
    out: &mut [f32],
    stride: usize,
    threads: usize,
) {
    assert_eq!(a.columns, b.rows);
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!((m - 1) * stride + n <= out.len());
    let parallelism = if threads > 1 && m * n * k > 1 << 18 {
        gemm::Parallelism::Rayon(threads)
    } else {
        gemm::Parallelism::None
    };
    // SAFETY: `Matrix::new` and the asserts above keep every index inside its slice, and `out` is
    // borrowed alone.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride as isize,
            true,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// `a · b` as one node per leaf of the contracted index, merged. Within a leaf the terms are added
/// in order.
pub(super) fn multiply_tree(
    a: Matrix<'_>,
    b: Matrix<'_>,
    leaves: &[(u64, Range<usize>)],
) -> TreeSum {
    TreeSum::of(leaves, a.rows * b.columns, |range, out| {
        multiply_part(a, b, range, out, b.columns);
    })
}

/// `out += a · b` over a range of the contracted index, in order.
pub(super) fn multiply_part(
    a: Matrix<'_>,
    b: Matrix<'_>,
    range: Range<usize>,
    out: &mut [f32],
    stride: usize,
) {
    let mut line = vec![0.0; b.columns];
    for k in range {
        for (j, x) in line.iter_mut().enumerate() {
            *x = b.at(k, j);
        }
        for i in 0..a.rows {
            let x = a.at(i, k);
            let row = &mut out[i * stride..i * stride + b.columns];
            for (y, w) in row.iter_mut().zip(&line) {
                *y += x * w;
            }
        }
    }
}
