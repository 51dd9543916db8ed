//! GEMMs through cuBLASLt.

use super::GEMM_WORKSPACE;
use crate::error::Error;
use crate::kernel::{Act, Gemm, Matrix};
use crate::meta::DType;
use cudarc::cublaslt::{result, sys};
use std::ffi::c_void;

pub struct Handle(sys::cublasLtHandle_t);

/// A GEMM with its layouts and the algorithm chosen for it.
pub struct Product {
    description: sys::cublasLtMatmulDesc_t,
    /// Layouts of b, a, the added matrix and the result: cuBLASLt is column-major, so it computes c^T = b^T a^T.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    pub algorithm: sys::cublasLtMatmulAlgo_t,
    alpha: f32,
    beta: f32,
}

fn failed(what: String) -> impl Fn(result::CublasError) -> Error {
    move |e| Error::Cuda(format!("cuBLASLt, {what}: {e:?}"))
}

fn data_type(d: DType) -> sys::cudaDataType {
    match d {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::E4M3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        DType::E5M2 => sys::cudaDataType_t::CUDA_R_8F_E5M2,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}

/// (transposed, rows, columns, leading dimension) for cuBLASLt, which is column-major, of the transpose of a matrix [rows, columns].
fn seen(m: &Matrix, rows: usize, columns: usize) -> (bool, u64, u64, i64) {
    // Row-major: in memory this is the column-major [columns, rows] already.
    if m.column == 1 || columns == 1 {
        let ld = if rows == 1 { columns } else { m.row }.max(columns);
        if m.column == 1 || rows == 1 || m.row != 1 {
            return (false, columns as u64, rows as u64, ld as i64);
        }
    }
    let ld = if columns == 1 { rows } else { m.column }.max(rows);
    (true, rows as u64, columns as u64, ld as i64)
}

/// An address, for as long as the scales' own are not known.
const SOMEWHERE: u64 = 256;

/// Sets where the scales of a and b are. cuBLASLt's A is our b.
///
/// # Safety
/// The description was made by cuBLASLt and is not destroyed.
unsafe fn set_scales(description: sys::cublasLtMatmulDesc_t, [a, b]: [u64; 2]) -> Result<(), Error> {
    use sys::cublasLtMatmulDescAttributes_t as A;
    for (name, address) in [(A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b), (A::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a)] {
        // SAFETY: as this function's; the value is 8 bytes.
        unsafe { result::set_matmul_desc_attribute(description, name, (&raw const address).cast(), 8) }
            .map_err(failed("a scale".into()))?;
    }
    Ok(())
}

/// An algorithm as cuBLASLt encodes it; valid for the same version of the library only.
pub type Algorithm = [u64; 8];

/// How many candidates are timed for a shape.
const CANDIDATES: usize = 12;

impl Handle {
    pub fn new() -> Result<Handle, Error> {
        Ok(Handle(result::create_handle().map_err(failed("starting".into()))?))
    }

    pub fn version() -> usize {
        // SAFETY: the library is loaded; the call has no conditions.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// The GEMM with the algorithm that cuBLASLt proposes first; and all proposed algorithms.
    /// `aligned`: the alignment, in bytes, of a, b, the added matrix and c.
    pub fn plan(&self, g: &Gemm, tf32: bool, aligned: [u32; 4]) -> Result<(Product, Vec<Algorithm>), Error> {
        let what = || failed(format!("{} x {} x {} of {}, {} at once", g.m, g.k, g.n, g.a.dtype, g.batch));
        let compute = if tf32 && g.a.dtype == DType::F32 {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        } else {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F
        };
        let description = result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F).map_err(what())?;
        let (b_t, b_rows, b_columns, b_ld) = seen(&g.b, g.k, g.n);
        let (a_t, a_rows, a_columns, a_ld) = seen(&g.a, g.m, g.k);
        let layout = |dtype, rows, columns, ld, batch: usize| -> Result<sys::cublasLtMatrixLayout_t, Error> {
            let layout = result::create_matrix_layout(data_type(dtype), rows, columns, ld).map_err(what())?;
            use sys::cublasLtMatrixLayoutAttribute_t as L;
            let (count, stride) = (g.batch as i32, batch as i64);
            // SAFETY: the layout was just made; each pointer is to a live value of the size given.
            unsafe {
                let set = |name, value: *const c_void, size| result::set_matrix_layout_attribute(layout, name, value, size).map_err(what());
                set(L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), 4)?;
                set(L::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const stride).cast(), 8)?;
            }
            Ok(layout)
        };
        let out = |m: &Matrix| layout(m.dtype, g.n as u64, g.m as u64, if g.m == 1 { g.n } else { m.row } as i64, m.batch);
        let layouts = [
            layout(g.b.dtype, b_rows, b_columns, b_ld, g.b.batch)?,
            layout(g.a.dtype, a_rows, a_columns, a_ld, g.a.batch)?,
            out(g.plus.as_ref().unwrap_or(&g.c))?,
            out(&g.c)?,
        ];
        use sys::cublasLtMatmulDescAttributes_t as A;
        // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
        let (first, second) = (b_t as i32, a_t as i32);
        use sys::cublasLtEpilogue_t as E;
        let epilogue = match (g.bias.is_some(), g.act) {
            (false, None) => E::CUBLASLT_EPILOGUE_DEFAULT,
            (true, None) => E::CUBLASLT_EPILOGUE_BIAS,
            (false, Some(Act::Relu)) => E::CUBLASLT_EPILOGUE_RELU,
            (true, Some(Act::Relu)) => E::CUBLASLT_EPILOGUE_RELU_BIAS,
            (false, Some(Act::Gelu)) => E::CUBLASLT_EPILOGUE_GELU,
            (true, Some(Act::Gelu)) => E::CUBLASLT_EPILOGUE_GELU_BIAS,
        } as i32;
        let mut product =
            Product { description, layouts, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] }, alpha: g.alpha, beta: g.beta };
        // SAFETY: everything passed was just made, and lives through the calls; the list of results is as long as is said.
        unsafe {
            let set = |name, value: &i32| {
                result::set_matmul_desc_attribute(description, name, std::ptr::from_ref(value).cast(), size_of::<i32>()).map_err(what())
            };
            set(A::CUBLASLT_MATMUL_DESC_TRANSA, &first)?;
            set(A::CUBLASLT_MATMUL_DESC_TRANSB, &second)?;
            set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if let Some(scaled) = g.scaled {
                let fast = scaled.fast as i8;
                let name = A::CUBLASLT_MATMUL_DESC_FAST_ACCUM;
                result::set_matmul_desc_attribute(description, name, (&raw const fast).cast(), 1).map_err(what())?;
                set_scales(description, [SOMEWHERE; 2])?; // which algorithms are proposed depends on there being scales
            }
            let preference = result::create_matmul_pref().map_err(what())?;
            let most = GEMM_WORKSPACE;
            let limit = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(preference, limit, (&raw const most).cast(), size_of::<usize>()).map_err(what())?;
            use sys::cublasLtMatmulPreferenceAttributes_t as P;
            let [a, b, c, d] = aligned;
            for (name, bytes) in [
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
                (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
            ] {
                result::set_matmul_pref_attribute(preference, name, (&raw const bytes).cast(), 4).map_err(what())?;
            }
            let mut found: [std::mem::MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>; CANDIDATES] =
                [const { std::mem::MaybeUninit::uninit() }; CANDIDATES];
            let mut count = 0;
            let [b, a, c, d] = layouts;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.0,
                description,
                b,
                a,
                c,
                d,
                preference,
                CANDIDATES as i32,
                found.as_mut_ptr().cast(),
                &mut count,
            );
            let _ = result::destroy_matmul_pref(preference);
            status.result().map_err(what())?;
            let found = found[..count as usize].iter().map(|f| f.assume_init_ref());
            let all: Vec<Algorithm> =
                found.filter(|f| f.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS).map(|f| f.algo.data).collect();
            let Some(first) = all.first() else {
                return Err(Error::Cuda(format!("cuBLASLt has no algorithm for a GEMM of {} x {} x {} in {}", g.m, g.k, g.n, g.a.dtype)));
            };
            product.algorithm.data = *first;
            Ok((product, all))
        }
    }

    /// Addresses: a, b, the added matrix, c, the bias (0 if there is none); and of the scales of a and b, for FP8.
    ///
    /// # Safety
    /// The addresses are of matrices on the GPU as large as the plan says, and the workspace has GEMM_WORKSPACE bytes.
    pub unsafe fn run(
        &self,
        p: &Product,
        [a, b, plus, c, bias]: [u64; 5],
        scales: Option<[u64; 2]>,
        workspace: u64,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<(), Error> {
        unsafe {
            if bias != 0 {
                let name = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                result::set_matmul_desc_attribute(p.description, name, (&raw const bias).cast(), 8).map_err(failed("a bias".into()))?;
            }
            if let Some(scales) = scales {
                set_scales(p.description, scales)?;
            }
            result::matmul(
                self.0,
                p.description,
                (&raw const p.alpha).cast(),
                (&raw const p.beta).cast(),
                b as *const c_void,
                p.layouts[0],
                a as *const c_void,
                p.layouts[1],
                plus as *const c_void,
                p.layouts[2],
                c as *mut c_void,
                p.layouts[3],
                &p.algorithm,
                workspace as *mut c_void,
                GEMM_WORKSPACE,
                stream.cast(),
            )
        }
        .map_err(failed("running".into()))
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made by `plan`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.description);
            self.layouts.iter().for_each(|&l| {
                let _ = result::destroy_matrix_layout(l);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::At;

    #[test]
    fn strides_become_transpositions() {
        let m = |row, column| Matrix { place: At::X(0).into(), dtype: DType::F32, row, column, batch: 0 };
        assert_eq!(seen(&m(7, 1), 5, 7), (false, 7, 5, 7)); // rows
        assert_eq!(seen(&m(1, 5), 5, 7), (true, 5, 7, 5)); // columns
        assert_eq!(seen(&m(12, 1), 5, 7), (false, 7, 5, 12)); // rows of something wider
        assert_eq!(seen(&m(1, 1), 5, 1), (false, 1, 5, 1)); // one column
        assert_eq!(seen(&m(9, 1), 1, 7), (false, 7, 1, 7)); // one row
        assert_eq!(seen(&m(3, 99), 5, 1), (false, 1, 5, 3)); // one column of three
        assert_eq!(seen(&m(99, 4), 1, 7), (true, 1, 7, 4)); // one row, with gaps
    }
}
