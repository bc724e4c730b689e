// A driver for libraries that compile kernels and never run one: modules load, nothing else works. cuDNN
// wants these functions to make plans for a GPU that is not there.
using handle = void*;
enum { NO_DEVICE = 100, NOT_FOUND = 500 };

extern "C" {

#define NOT_HERE(name) int name(void) { return NO_DEVICE; }
#define DONE(name) int name(void) { return 0; }
#define MAKES(name) int name(handle* made) { *made = (handle)64; return 0; }
#define SAYS(name) int name(int* value) { *value = 1024; return 0; }

int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuGetProcAddress_v2(const char*, handle* found) { *found = 0; return NOT_FOUND; }
int cuGetProcAddress(const char*, handle* found) { *found = 0; return NOT_FOUND; }

MAKES(cuModuleLoadData) MAKES(cuModuleLoadDataEx) MAKES(cuModuleLoadFatBinary) MAKES(cuModuleGetFunction)
MAKES(cuLibraryLoadData) MAKES(cuLibraryLoadFromFile) MAKES(cuLibraryGetKernel) MAKES(cuLibraryGetModule)
MAKES(cuKernelGetFunction)
SAYS(cuKernelGetAttribute) SAYS(cuFuncGetAttribute) SAYS(cuOccupancyMaxPotentialClusterSize)
DONE(cuModuleUnload) DONE(cuLibraryUnload) DONE(cuKernelSetAttribute) DONE(cuFuncSetAttribute)

NOT_HERE(cuCtxGetCurrent) NOT_HERE(cuCtxGetDevice) NOT_HERE(cuCtxGetLimit) NOT_HERE(cuCtxPopCurrent)
NOT_HERE(cuCtxPushCurrent) NOT_HERE(cuDeviceGet) NOT_HERE(cuDeviceGetAttribute) NOT_HERE(cuDeviceGetCount)
NOT_HERE(cuDevicePrimaryCtxRelease) NOT_HERE(cuDevicePrimaryCtxReset) NOT_HERE(cuDevicePrimaryCtxRetain)
NOT_HERE(cuGetErrorName) NOT_HERE(cuGetErrorString) NOT_HERE(cuGetExportTable) NOT_HERE(cuInit)
NOT_HERE(cuLaunchCooperativeKernel) NOT_HERE(cuLaunchKernel) NOT_HERE(cuLaunchKernelEx)
NOT_HERE(cuLinkAddData) NOT_HERE(cuLinkAddData_v2) NOT_HERE(cuLinkAddFile_v2) NOT_HERE(cuLinkComplete)
NOT_HERE(cuLinkCreate) NOT_HERE(cuLinkCreate_v2) NOT_HERE(cuLinkDestroy) NOT_HERE(cuMemcpyDtoH_v2)
NOT_HERE(cuModuleGetGlobal_v2) NOT_HERE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_HERE(cuStreamGetCtx) NOT_HERE(cuStreamSynchronize) NOT_HERE(cuTensorMapEncodeIm2col)
NOT_HERE(cuTensorMapEncodeTiled) NOT_HERE(cuThreadExchangeStreamCaptureMode)

}
