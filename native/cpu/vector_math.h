// Elementary functions on vectors. Every lane goes through the same operations, so a tail gives the bits of a full vector.
#pragma once

// 2^x for x <= 127: x = n + f with |f| <= 1/2, a polynomial of degree 5 in f (relative error 1e-7, exactly 1 at f = 0), times 2^n.
// Exactly 0 below -200, also for -inf; not-a-number stays. The coefficients are a fit of this file's own (least squares reweighted
// to an even error).
INLINE VF exp2_of(VF x) {
  x = max(set1(-200.0f), x);
  VF n = round_even(x);
  VF f = sub(x, n);
  VF p = set1(0.001326472614891827f);
  p = fma(p, f, set1(0.009671512991189957f));
  p = fma(p, f, set1(0.05550733581185341f));
  p = fma(p, f, set1(0.24022242426872253f));
  p = fma(p, f, set1(0.6931470036506653f));
  p = fma(p, f, set1(1.0f));
  return scale_exponent(p, n);
}

// 2^x for x <= 0, cheaper: never below 2^-126, not even for -inf. The whole part is found by adding a number so large that the
// fraction falls off, and goes straight into the exponent. EXACT: relative error 1e-7, otherwise 3e-6; both give 1 at 0.
template <bool EXACT>
INLINE VF exp2_negative(VF x) {
  x = max(set1(-126.0f), x);
  VF shifter = set1(12582912.0f);  // 1.5 * 2^23
  VF t = add(x, shifter);
  VF f = sub(x, sub(t, shifter));
  VF p;
  if (EXACT) {
    p = set1(0.001326472614891827f);
    p = fma(p, f, set1(0.009671512991189957f));
    p = fma(p, f, set1(0.05550733581185341f));
    p = fma(p, f, set1(0.24022242426872253f));
    p = fma(p, f, set1(0.6931470036506653f));
  } else {
    p = set1(0.009582852013409138f);
    p = fma(p, f, set1(0.055906426161527634f));
    p = fma(p, f, set1(0.24024099111557007f));
    p = fma(p, f, set1(0.6931241750717163f));
  }
  return add_to_exponent(fma(p, f, set1(1.0f)), t);
}

// x / (1 + e^-x). e^-x is held below 2^126 so that the quotient of a large negative x is a tiny number and never 0 / inf.
INLINE VF silu_of(VF x) {
  const float kLog2E = 1.4426950408889634f;
  VF e = mul(x, set1(-kLog2E));
  VF limit = set1(126.0f);
  e = sub(limit, max(zero(), sub(limit, e)));
  return div(x, add(set1(1.0f), exp2_of(e)));
}

// Round to T and back.
INLINE VF rounded(VF v, float) { return v; }
INLINE VF rounded(VF v, bf16) { return widen(narrow(v)); }
