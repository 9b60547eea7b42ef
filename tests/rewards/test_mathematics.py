import pytest

from maxrl_fast.rewards import verifiers
from maxrl_fast.rewards.mathematics import equal
from tests.rewards.pools import GB, pool
from tests.tables import table

# correct answer | right ones | wrong ones
PAIRS = table(r"""
7 | 7. ; 7.0 ; x = 7 ; f(2) = 7 ; \text{Area} = 7 ; \angle ABC = 7 | 1=7 ; 2+2=7 ; 2x=7 ; 7.0000001
7 | area = 7. ; P(A) = 7 ; |AB| = 7 ; x_{10} = 7 ; f^{-1}(2)=7 | 7, 8 ; 7 \text{ or } 8 ; 77
7 | x = 3 + 4 = 7 ; 07 ; 5+2 ; \$7 ; {7} ; 7 \quad | x^2 = 7 ; x+1=7 ; (1,2)=7 ; 9^{9^9} \% 7 ; -7
12. | 12 ; 12.0 ; 12\text{ cm}. ; 12 apples ; 12 dollars | 12.1 ; 1.2 ; 120 ; 12\text{ million}
10080 | 10\,080 ; 10~080 ; 10\ 080 ; 10 080 ; 10{,}080 ; 10,080 ; 10,\!080 | 10 ; 10\,08 ; 1080
3 1/2 | 3.5 ; 7/2 ; 3\frac{1}{2} ; 3\,\frac12 ; 3~1/2 ; 3 \tfrac{1}{2} | 3/2 ; 31/2 ; 3 1/3
1200000 | 1.2 million ; 1.2\text{ million dollars} ; 1200 thousand | 1.2 billion ; 1.2
-2 3/4 | -2.75 ; -\frac{11}{4} | -1.25 ; 2.75
3 125/128 | 509/128 | 3125/128
1e-5 | 0.00001 ; 10^{-5} | 1e-4 ; 0
0.00001 | 10^{-5} ; 1e-05 ; 1 \times 10^{-5} ; 1.0e-5 ; \frac{1}{100000} | 0.00002 ; 10^{-6} ; 0
10000000000000000 | 10^{16} ; 1e16 ; 1e+16 ; 10^16 | 10^{15} ; 10000000000000001
602000000000000000000000 | 6.02 \times 10^{23} ; 6.02e23 ; 6.02E+23 | 6.03 \times 10^{23}
2e-1 | 2e - 1 ; -1 + 2e | 0.2
1/3 | 0.333333 ; 0.3333333333 ; \dfrac13 ; \frac{2}{6} | 0.3333 ; 0.334 ; 3 ; \frac{1}{4}
123456789.123 | 123456789.12300001 | 123456789.124 ; 123456790.123
123456789123456789 | 123\,456\,789\,123\,456\,789 | 123456789123456788
0.5 | .5 ; 50\% ; \frac{1}{2} ; 1/2 | 0.05 ; 5
\pi | 3.14159265 | 3.14
5 | 5 hours ; 5 \text{ cm}^2 ; 5 \mathrm{km} | 5 \text{ hours } 30 \text{ minutes} ; 5 feet 6 inches
5 hours 30 minutes | 5.5 hours ; 330 min ; 5\text{ h } 30\text{ min} | 5 ; 5 hours
1.5 km | 1500 m ; 1.5 kilometers ; 1.5 | 1.5 m ; 1.5 miles
90 minutes | 1.5 hours ; 1 hour 30 minutes ; 90 | 90 hours ; 90 seconds
2 dollars 5 cents | 205 cents ; 2 dollars and 5 cents | 2 ; 2 dollars ; 5 cents
x=2 | 2 ; x = 2. ; 2=x | y=2 ; 2+2=2 ; 3
y=2x+1 | 2x+1 ; y = 1+2x | y=2x ; 2x-1
2 | \frac{4}{2} ; \sqrt{4} ; 2! | x=2 \text{ or } x=3 ; \pm 2 ; 2 = 2
x=1,y=2 | x = 1, y = 2 ; (1,2) | x=1, y=3
(1,2) | (1, 2) ; \left(1,2\right) | (2,1) ; 1
\{1,2\} | \{2,1\} ; 1,2 ; 2, 1 | \{1,3\} ; 1 ; (1,2)
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2} ; 2^{-1/2} | \sqrt{2}
x \le 3 | (-\infty, 3] | (-\infty, 3)
\text{(A)} | A ; \text{A} | B
\text{yes} | yes | no
5 g | 5\text{ g} ; 0.005 kg ; 5 | 5 kg ; 5 mg ; 5 cm
72 km/h | 20 m/s ; 72 \text{ kilometers per hour} | 20 km/h ; 72 m/s ; 72 mph
5\text{ cm}^2 | 5 cm^2 ; 500 mm^2 ; 5 square centimeters | 5 cm ; 5\text{ m}^2 ; 5 sq inches
60^\circ | 60 ; 60 \text{ degrees} ; \frac{\pi}{3} ; \pi/3 rad | 60 rad ; 60 \text{ radians}
\$5 | 5 ; \$5.00 ; 500 cents ; 5\text{ dollars} | 5 cents ; \$50
7 apples | 7 ; 7 \text{ Apples} ; seven apples | 7 pears ; 8 apples ; 7 apple pies
7:00 pm | 7\text{ p.m.} ; 7:00 PM ; 7:00 | 7:00 am ; 7:30 pm
7 | \approx 7 ; x \approx 7 ; seven ; \text{Seven} | 7\% ; 7 percent ; 7_8 ; \approx 8
7\% | 7% ; 0.07 ; 7 ; 7 percent | 0.7 ; 70\% ; 700
21 | twenty-one | twenty ; 21_5 ; \text{one}
443_5 | 443_{\text{five}} ; 443 | 443_6 ; 123
AC | \text{AC} | CA ; AB
(1,2) | \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \{1,2\} ; \begin{pmatrix} 2 \\ 1 \end{pmatrix}
1/2^{99} | 2^{-99} ; \frac{1}{2^{99}} | 1/2^{98} ; 2^{-100} ; 0
2^{1024} | 4^{512} | 2^{1023} ; 2^{1024}-1
1/3 | 0.\overline{3} ; .\bar{3} ; 0.3\dot{3} | 0.\overline{4} ; 0.3 ; 1.\overline{3}
(-\infty, 3) | x < 3 ; 3 > x | x \le 3 ; x > 3
1/2 | \sin 30^\circ ; \cos(60^\circ) ; \sin\frac{\pi}{6} | \sin 30 ; \sin 60^\circ
\arcsin \frac{1}{2} | 30^\circ ; \frac{\pi}{6} | 30 ; 60^\circ
2i | \sqrt{-4} ; 2\sqrt{-1} | \sqrt{4} ; -2i
\sqrt{-1} | i | 1
2^{100000} | 2^{100000}. | 2^{100001}
""")


def test_answers_are_compared_as_mathematics():
    pairs = [
        (answer, given, is_right)
        for answer, right, wrong in PAIRS
        for cell, is_right in ((right, True), (wrong, False))
        for given in cell.split(" ; ")
    ]
    assert [pair for pair in pairs if equal(*pair[:2]) != pair[2]] == []


@pytest.mark.parametrize("digits", range(4, 40, 7))
def test_a_fraction_equals_its_first_decimals_at_any_size(digits):
    assert equal(f"0.{'0' * digits}123456", f"0.{'0' * digits}1234561")
    assert not equal(f"0.{'0' * digits}123456", f"0.{'0' * digits}1236")


def test_a_box_that_the_trainer_has_found_is_not_searched_again():
    assert verifiers.mathematics("\\boxed{8}", "7", given="7") == 1.0


def test_what_cannot_be_compared_is_wrong():
    hostile = table(r"""
    9^{9^{9^{9}}} | 10000000! | 2^{10^{10}} | (x+1)^{100000} | \prod_{i=1}^{10^8} i | 9!!!!!!
    \binom{100000000}{50000000} | ((3!)!)! | 10^{-10^9} | 0.5^{10^9} | \gcd(10^{10^8},3) | (10^5)!
    9^{9!} | 1e99999999 | \Gamma(10000000) | 7 \bmod 9^{9^9} | \sin(10^{10^9}) | 10,000,000!
    """)
    answers = [answer for row in hostile for answer in row] + [f"{'(' * 80}7{')' * 80}"]
    rows = [{"prompt": "", "response": f"\\boxed{{{x}}}", "answer": "7"} for x in answers]
    late = {"prompt": "", "response": "\\boxed{(x+1)^{3000}+y}", "answer": "7"}
    with pool("mathematics", 1, 3.0, 2 * GB, verifiers.__name__) as one:
        outcomes = one.score([*rows, late])
    assert {outcome.reward for outcome in outcomes} == {0.0}
    assert [outcome.kind for outcome in outcomes] == [""] * len(rows) + ["timeout"]
