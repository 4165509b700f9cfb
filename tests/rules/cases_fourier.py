"""Fourier transforms."""

from jax import lax

from tests.rules.case import Case


def fft(kind, *lengths):
    return lambda x: lax.fft(x, kind, lengths)


CASES = [
    Case("fft", "fft", fft("fft", 36), "c64[2,36]", "i j -> i j | permute=j"),
    Case("fft of blocks that begin inside rows", "fft", fft("fft", 55), "c64[55]",
         "i -> i | permute=i"),
    Case("fft of a prime", "fft", fft("fft", 13), "c64[13]", "i -> i | permute=i"),
    Case("fft of none", "fft", fft("fft", 12), "c64[0,12]", "i j -> i j | permute=j"),
    Case("ifft", "fft", fft("ifft", 24), "c64[24]", "i -> i | permute=i"),
    Case("fft of two dims", "fft", fft("fft", 4, 6), "c64[5,4,6]",
         "i j k -> i j k | permute=j k"),
    Case("rfft", "fft", fft("rfft", 48), "f32[2,48]", "i j -> i j | permute=j"),
    Case("rfft of an odd length", "fft", fft("rfft", 75), "f32[75]", "i -> i | permute=i"),
    Case("rfft of two", "fft", fft("rfft", 2), "f32[5,2]", "i j -> i j | permute=j"),
    Case("irfft", "fft", fft("irfft", 48), "c64[2,25]", "i j -> i j | permute=j"),
    Case("irfft of an odd length", "fft", fft("irfft", 75), "c64[38]", "i -> i | permute=i"),
    Case("irfft of one number", "fft", fft("irfft", 1), "c64[5,1]", "i 1 -> i 1"),
]  # fmt: skip
