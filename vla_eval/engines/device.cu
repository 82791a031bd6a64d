// What all kernels of our own are written with; `KIND` is f16 or bf16. This text stands before theirs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE float widen(u16 h) { float f; asm("cvt.f32." KIND " %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 rounded(float f) { u16 h; asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE u32 rounded(float low, float high) { u32 r; asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEVICE float low(u32 pair) { return widen((u16)(pair & 0xffff)); }
DEVICE float high(u32 pair) { return widen((u16)(pair >> 16)); }
DEVICE float power_of_two(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
DEVICE void load_matrices_turned(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
