# What every run relies on: CPUID and XGETBV tell of AVX-512, and its instructions give the right numbers. A program without
# libraries; ends with 0, or with the number of the first check that failed.

        .intel_syntax noprefix
        .globl _start
_start:
        # 1: the processor has XSAVE, in use
        mov eax, 1
        xor ecx, ecx
        cpuid
        mov r15d, 1
        bt ecx, 27
        jnc failed
        # 2: opmasks and ZMM registers are enabled
        inc r15d
        xor ecx, ecx
        xgetbv
        and eax, 0xe6
        cmp eax, 0xe6
        jne failed
        # 3: AVX512F, BW, VL
        inc r15d
        mov eax, 7
        xor ecx, ecx
        cpuid
        mov r14d, ecx
        mov eax, 0xc0010000
        and ebx, eax
        cmp ebx, eax
        jne failed
        # 4: sums under a mask, with a rounding of their own: 1 + 2 in even lanes, 1 in odd ones
        inc r15d
        mov eax, 0x3f800000
        vpbroadcastd zmm0, eax
        mov eax, 0x40000000
        vpbroadcastd zmm31, eax
        mov eax, 0x5555
        kmovw k1, eax
        vmovaps zmm1, zmm0
        vaddps zmm1{k1}, zmm0, zmm31, {rz-sae}
        mov eax, 0x40400000
        vpbroadcastd zmm2, eax
        vpcmpeqd k2, zmm1, zmm2
        vpcmpeqd k3, zmm1, zmm0
        knotw k3, k3
        kxorw k4, k1, k2
        kxorw k5, k1, k3
        kortestw k4, k5
        jnz failed
        # 5: a fused product keeps what a separate one loses: (1 + 2^-12)^2 - 1 - 2^-11 = 2^-24
        inc r15d
        mov eax, 0x3f800800
        vpbroadcastd zmm3, eax
        mov eax, 0xbf801000
        vpbroadcastd zmm4, eax
        vfmadd231ps zmm4, zmm3, zmm3
        mov eax, 0x33800000
        vpbroadcastd zmm5, eax
        vpcmpeqd k1, zmm4, zmm5
        kortestw k1, k1
        jnc failed
        # 6: products of signed 16-bit pairs: 7 + (-3)(5) + (-3)(5) = -23, if there is VNNI
        inc r15d
        bt r14d, 11
        jnc passed
        mov eax, 0xfffdfffd
        vpbroadcastd zmm6, eax
        mov eax, 0x00050005
        vpbroadcastd zmm7, eax
        mov eax, 7
        vpbroadcastd zmm8, eax
        vpdpwssd zmm8, zmm6, zmm7
        mov eax, -23
        vpbroadcastd zmm9, eax
        vpcmpeqd k1, zmm8, zmm9
        kortestw k1, k1
        jnc failed
        # 7: of unsigned bytes with signed ones: 7 + 4(200)(-3) = -2393
        inc r15d
        mov eax, 0xc8c8c8c8
        vpbroadcastd zmm10, eax
        mov eax, 0xfdfdfdfd
        vpbroadcastd zmm11, eax
        mov eax, 7
        vpbroadcastd zmm12, eax
        vpdpbusd zmm12, zmm10, zmm11
        mov eax, -2393
        vpbroadcastd zmm13, eax
        vpcmpeqd k1, zmm12, zmm13
        kortestw k1, k1
        jnc failed
passed:
        xor r15d, r15d
failed:
        mov edi, r15d
        mov eax, 60
        syscall
