"""Throw-away: forms of prefill attention side by side. Bits against the kernel of every GPU, TFLOP/s beside FlashAttention 3.

    python sweep_prefill.py [--only NAME ...] [--kill 110]

Every form runs in a process of its own (all compile at once); a GPU is timed by one process at a time (a file lock).
"""
import argparse, base64, fcntl, json, os, statistics, subprocess, sys, tempfile, time, zlib

PARKED = dict(PARKED=1)
HELD = dict(PARKED=1, HELD=1, QUEUE=1, STAGES=5)
THREE = dict(PARKED=1, WORKERS=3, STAGES=3, REGISTERS=152, REGISTERS_EACH=128)
WHOLE = dict(PARKED=1, TILE=128, STAGES=2, REGISTERS=232)
FORMS = {
    "main": None,  # the committed kernel
    "parked": PARKED,  # main, earlier segments' sums in memory, side by side
    "held": HELD,
    "held, bridged": HELD | dict(BRIDGED=1),
    "held, bridged, early": HELD | dict(BRIDGED=1, EARLY=1),
    "held, turns 2": HELD | dict(TURNS=2),
    "three": THREE,
    "three, bridged": THREE | dict(BRIDGED=1),
    "pairs": WHOLE | dict(PAIRS=1, REGISTERS=240),
    "128 keys": WHOLE,  # another contract: bits differ
    "128 keys, early": WHOLE | dict(EARLY=1),
    "128 keys, early, turns 1": WHOLE | dict(EARLY=1, TURNS=1),
}
TIMED = [  # heads, groups, width, sequences, queries of each, keys before them, page (0: in one piece)
    (32, 8, 128, 16, 1024, 0, 0), (32, 8, 128, 4, 4096, 0, 0), (32, 8, 128, 4, 8192, 0, 0), (32, 8, 128, 1, 32768, 0, 0),
    (32, 8, 128, 4, 2048, 2048, 16), (16, 8, 128, 1, 32768, 0, 0),
]
CHECKED = [  # heads, groups, width, counts, contexts, page, type
    (32, 8, 128, [1024, 8192, 333, 1, 4097], [0] * 5, 0, "bfloat16"),
    (32, 8, 128, [32751], [0], 0, "bfloat16"),
    (32, 8, 128, [8191, 2500], [0, 0], 0, "bfloat16"),
    (32, 8, 128, [2000, 77, 1, 1025, 64], [6192, 1500, 3000, 1024, 1023], 16, "bfloat16"),
    (16, 8, 128, [3000, 65, 127], [0] * 3, 0, "bfloat16"),
    (14, 2, 64, [77, 1, 600, 64, 2090, 1025], [5, 1500, 0, 1023, 70, 1024], 64, "bfloat16"),
    (16, 1, 128, [77, 1, 600, 64, 2090], [5, 1500, 0, 1023, 70], 32, "float16"),
    (32, 8, 128, [512, 100, 1, 900], [0] * 4, 0, "bfloat16"),
    (16, 16, 72, [1500, 64, 700], None, 0, "bfloat16"),  # a tower: every query reads all keys
]
OLD = {'old_prefill': 'eNrdW+tz2zYS/66/AuNOe6TDKJbs5lI3ypwaK4mvju2znbp3Gg9FS5DEmiIZkrKs/PW3DwAkRUpyXvfhPJOID2Cxu/hhXwB3dna6WSbDzI9CEY3FzAuX4uNcJr5MBTx6F8WxTA7hUoqFl8STJJrH2NATcRJNEm8mbhM/nKQi8wOZOiKbShHBf0kqZvMg8+Ng2Ww0ukEaYa8sWsAbRyyggRTyXiY82lIk0hulwgsCcSeXKbb1s1SkEt6GQ/kr0vUTMaVWM28pbqUIvSRBevDOC4Eh5ADGugIOvMTPpjOZ+UPhp2LgaRGbLjYa/A1GCkel539FfgjPHRGBvB6pYxwlhTvssACqMBBxDDTSYZSAmvwQuWuk3kyCGBM/zUhGkPgWZfAmiZRNcRYGS9JOugyH0yQK/ZQJj/zxGDocsuA4zL0XzIEuiOffS3HL3YDTFBiayVmULBvecCgDZA0e+Sg8TgJpmKeBtZHz6IG6Z94IyEQTidPDshA/8xnpm2YOpvlWguAS1O8QM17DzDuSi8bZzHsQyTxMYRZhjCJzPNYiSu5IeQYLTXHOYAECmbdkwpl3x51D+ZCJ2yAa3iEbCnwNgEiIAMEmS+J/RCBEtuGi2djZ2Wk0xkk0E647nmfzRLqu8GdxlGRAP4wyUm/aaKhnoKrhlDvQpW57RbyrF4AbQIN8gGn3Z4ANL9DNJsE8Cte2atJr3TbwwsncmwAOU+i3pVNTt26G9/7I95pTWnOaltUQ8DfGVeB6iB03nYI2Rg49n90iSmTCd2am3NnMq3nkLjyY1oa9jaNaRlhPRzIdJn4MGlTKT4IgiuJmOJ8BlWHavJNJKIO0ydR151ROcIT0MX2aIzmMAKqq68gHbuToUT0Dbx7mM9s9OX57+r53euWI3p/d1/ATo71wo7GbLSIHLdhQpiCUYisKRm6cyLEfBG4QoaUpzcGb497J0SWr9eSse9S7UDf/+tD70OPLi7Nr9fDyqvu2p66vjk/U++uzi99NP7KcfBl4aeaCAeC7KBlJmmK70bjsvUURRAeQ1BwCoDOYsMTSCm2q93bj8vr4P/856R2ttoSb0z/ev+9eEmxOvGU0z6xW+4UjWs8d0bZtIX4Q02jBpkMEvmxcHx9dvbsEQtbzA2jWfmE3Tnrdyyv3HGSCxy+wC9heMFq4gAvGCE3Ewv/0KUBTGEsP7B/YQBmAwxiDWUSjiC6mcdF7e3x5BZpY5bbdPiCGyMVkU3QLaN8z7U3QNJjObq/7+h1QaD0njtBkEEPaNYGxSQBzbz6cnECrN16QSmyHlgdMYtHvsWM6BAs2i0ENIzZRYETQ0qEj9MTb8w9iKQEMmUyz9Nkknj/DKxcuXH8G6zdtxmCq50mIMkMfmLzGSI55OOvjoVpBjrjLL+8Lly6oID4Ecw6Wl8xhWrxxU/+TVA+G3jz1gkNxG0UBCHaVzKUtnr6i+0NCEBhHfCr8sRiABAOw8jFCOUX9pNpgp000otg+Rv7BL/sjMK8dNbzogGoBjMLKORCvOqKABdRS4eVPpaZPRctGGnu2Iz42wWzFst++ofGM7+6Qklkg5WORhR8BY9iTHjEc+3s34qV6/VI/azE5egr8agE64s6Mh3f3+R0StLgZOE6FdJBRc2QTwUTiRApLMQbvEUQ29f7YBLTj4iMpLRKxnfOufDjNJshhjFAuDykbwPEPtrZ/+RnhxGVfbSkP6GhfDiYe/h9Gc5z612fnx72jw9KiccRl+YFtQPAbxCOAxywy0RgtEB3hcRCAXnxA9Ae4FjAOaYoBjzQ4VKuQw66pBxHJAowtAAhQbvDjGqbvXMW2q8KYDsuhmoGrDgIHL+QszpbYXj251xf0AkEIclMvWMbgSzusAlApm9aS/2uiZ7OYVtMPR/LBol62Upx49kx1A4y2eI5hbSht0m29m7W47SeZRCnbKrq0LLL0ZNlhDHg8Bo+R7bdhLkoIKvlfa1VLJVab4Gxn80xaVsuBNQNkaShHzFPgaTjskAFzIKJlDju07utwBBGdNfPSFEfCm8dDqQ453mhEoFHzqYJMjZgaCKAjS9GgsUfZAgBXI+AbAOD+uwGgdjq1ju9rZlNrfvtscUjNMQabAJivKMb/ICTDoCX10U/xLALdoYc/4NF/32oJHHG+8oCGObr693lv9YV9iM5xPMsORXrnxxoIVpGXMeYQgIAFuuSMsjgf2GVFFM2MbXABWlasGi0DPhQqxBNkwksgBJbWHq8nWk6XgT+UKljZw0Vlm94qpaHFSImkBfT6p5AUOOIQfETHaKx/6Ah8fuMYxdIytXae+uF4R9Gc+hPwiRkThJnwZ/MZC833lu4L3myXtc8dldTUD1TYxlBrDLDQ7fEW4Kju2QWZ6SubDEc8VWwYnhV3pPF8COAL/Kpqyy1oargJjl6YKRoFYGiA2rJLaFZkSrPrKFRA6pW5AU8Ad29mkUXAAW7P65CME8owNqZAD1zEEK+LNaiuM1S1SOcgexXt3a3wX4PyM8gtCZDKATqF7LZg+Ko58mIapVJDAdPUCSTtIBVeguWUo4KBXG/7jPer2j6N9keFB6wq44SAAawLdB7pEzBi0zTs8ujVPBK9VJ/f32ggxitQGkeQry00C8rQfbaNA3FgIjWYmqNsGasVyIKYdVjDJNiOPmtBt1PMGsfBZRaLFK8suGW0YRtvox1Jp1VaQkbCKsbBWFSXklliRQMHmuzatln5dU4ixhjMegDKaEW2wD734l0BqfItxNlYj5Ee5MYQ5AI4hxBYpLpmpgGqRKoy/bCNYzbjHBkpM/fA84TtauTRboLNBVB0BMU2ZStAebCBKOfOq6K/63WPKmbg7cXZh/PLOotBAf9q8+vVB/88Oz6tEH3d/XDZPXmkPekaT4joN8CEuJpoQ1jtAZ7CDGtfqp4ZROAETTVTJfhNUHAGwTiNPeB8G3B8p5JYKqEak7ukaS4WTiEfx9KCmeLLd92LFccP64Z0iBES621diAAtYaZ4Xk0OlC3rLDG7I6o7HPlplvi3ENjq4kN/H+Jb8Ml9LC7gLxYi2PO3nqvl2f1aetcFYud1xI6i7Ayru+EoDzO6WBChLj+IqwjiTrBUaMXmkB9KcJa3cAVhToI+mRcWF3qpQkHLa+qlMK64XWbsMTxccE2G3ruzk14tJwWJ/FB6iWLIRDz9/p6SDH7b6vdA/e63b3D9WdTo+QHcQMR1Tbl7+4WQWPPo39jQot9/gXq6ccp0Xyg6oC1UnVJlO1cpdoGmqFR6tN/Wz/Af50HXiqpdXQwfTULIfrUuL9SesZIVrnWLVAyGhJpu2FzrO0D+XLppEOWPylnCx2KWkLe2MetiQxgtkD9VhrO0GcqbmpYcJFD7V2Ivj3BvMXvaQqKVh7RZdCe3NW/nzaPxOJXZlvb7eXvetdnc/CBvjhYDWuuapEXCOCSlo8Z22JJoo2ivCP6ko6w1+EAEiHkN0OQWL7l+aF5sTL70ny5bdDSoKnMI46kSKwCer8okxn5CwikVPlHsYHaIApXaAocIOZaonKcw6qtOsZinUF1NxTXFEZFs7XigHCyGKT9TelVkHeel8rIwEE0fD7Or8J/jLFaJAuYlXMOwV5KicmqyXcRC+lEsjXw2HQqZqhWW6xVC3ZX5BIenXCXW88wEKSXgOKqADtol18smsSVevhT7e3ZVzTIcqVTQDykV1OSfaFI5dXuFqn5enR4Poqnvof0C8W8zDYbgl83HtqQB4/FHZTJYLkHubtbKC9F2Ljn4FQ6tTTJQLqzU8+isoZWnI2ryTWSq2KJ8hEKkCvUqv+yewCZWcQFhBtXIOIAo7IenEsuz0yjA/VGJWxEU9jUrFPCpRMTmMC2UMQowZvNBSwIgbkN2Y2Tbs9EgYQQGFgN/qrYHt3PR1Zk1lg/HkRvzoSqih7U61+nnGp0XQFcoJdT9VcoLWyh+TrVh7aCq+npJUeJ5fbua8OczwFBVcmEmtX7LerdpMv+PtW7W2/dS+poSSUGKdXUSLuiutZ1fWJcoTd1X1ihWgguV1YK2dCBFZmcYzUxFK5v6qYHYnZSxqfTy3k+tdtcXUDVC7Np+20ubtcpd6WZc65a+dzJGFk2g9FLLWds6lItihVmrBPfwynCvq7oWHPJuzrNdz1fBcetqdpyXZIGPdd3iuk5ctd7ANDTQato4K7rkxBIhoHUBu2tv1hiVwGkBFLShCmKaqlHKKmn7C2eDB1yrrTyYYQrVGhcrcHOZS1dOa4fBAPBww1Rp/W8EQY6cTWIYiRubrIVKpuvy3ForAQLHc1wi6sSNmsSqqnLkV3Vl57sEJeIeErY4zy2nQNRjgul49vwAd1i4GvVEZa273Ep1+rEmbcI9DizUWBiBP4GRHEG2hAKhIJq0mWEbae81n/+y3zr4e+vF3s8///LLwc/7lNeqdHQlIUGio8/NAKnKY28SXtH9bPlVvzoVqIwl5+66bhOtjjWjvAreoBNpMy/y7nL1FJ6OzHZbHT4YSHq8qtO2lCRK6fkAPwlrpM922PkQjUd4e1p9+AoCZSrH8AFE8GbG+X7TxYLk3TUZ55pgbMMudi1nX3CkYT2d+6+nUxOElAjVRR01gRdV7kpPSgU7ev0jn6lr1Muyvn5HnUEe6l0W53E1vepOhRo5tU4rmy4XF8d/9Gp3XjBWVEsyCKKhl0lV0HL5/K5Z7xAFnnJp14j4/je+UOtWbwNjYR/xRgvWy/yhy8g7LSDN0ICUL7OQCaUk38wRM13awqKaalFwaxS5YQQeJpZD3wv8T7LT39E7CumOI3bIlNEVnxQzV3QkilpAupLuQExLSlSnKtXmsCPuHHGPRd4RnSa9xbzmvnyDp6cczoVdOsbn6O0Scx6On+Z7RySgTByz+UF7jMioOm5JrBaP08F7ZNMkJo/fS3rcPhIN+9vZn994e6l+a+Zj/caMPoOTG/j1qCTCAEldQt1VR1uFKfILfcq0YNa301NnYVWl4PuRsfPTs49Zfli+6rOp2NWnex+zFtXqzjWaGwmlL3U8mEqETvW10m/plRZOdS0oZkObmneG9rr9mLVVdgyOwVcWln1hB6pk2avBQuEo8+aG394A1Cz7NSE2mYJNZqB225mMgjYDauFTgAULW6/a6ogrYc/KrWU2wCFWfdzu994GTsiemL2Yrx+r9SVjFfcVD9T2pDmpDSZEX9bvFPJR6WQeKh/xWaelCyjJWyi05A8KqDEPc8dQPF9Nujnkwjx5mJwIhZlmiOo5bLDYeBIbY9f6gwFvwA+mYgBEB/wRElAcOOTfqdQyoI39gUi9ZSqWdKiuqQZM8XuSwkdL5mogpkCKznbP6MSm4O8ifqVBByTOAL+EwlHoGwg+zbSIzMEASy8P+sRKnQTHUj9GzrTjpnN0fbJaHb0uOFt9aryoaW5sPJGrT5gXv8Tg49jKtkYP8HbmhxZa+SbtFRfXKu24qIFeiRZvu+RNicY6s1Ky2aufs+Ahl34gQ+shl3qX1YBIZnNEe/DAolMQpuCGmIc85kR145EdPAkOoZtl3a2ShrGse41m5V7UYSo0SSZtxA4Wf/0G4S3ToKK9pew9D622WxUfmDPq2cHEkrvlO+aSw4ZQLlze4oF1TzFEhz6QYhfJ3MT6+y2eG2Uv8w9oLIg+5D1km0oGHfH1Ld3TsW9y5f8PQ8DGZ9j/YhjYUQuBLWCHdacMYYfmDm46OQzygcAvdAgjZCo7Cqy7xe8kXumtRA1wNqcdNigOni1x0RennQMsDz+EiZx0yp+9OGJ3l79qqjOn/wUskISX', 'old_prefill_loads': 'eNq1GPtv28b5d/0VBw/pSJthbSctCsca5jZuE9SYNz/gDkZGncWTxIrkybyTHPev3/e4o0iRctS1MxJJPH7v93d7e3s3MyVyLdOsnIonWS2mlV4uhJ6I0aJSkyzPRyfioYK3Rjzkejw3+O5xqapMmUjIMhU2yxWdztWzoZOVzJdwlJVCCkSN9/b2BoNJpQuRJJOlXVYqSURWLHRlAaHUVtpMl8bB2CqzuozV5wVwKVRpZe6Bp/lSl1uhYnrtYXNZTpdyqoQ0gPcFpNhDx+UqSzMZywJAVC2keS7HyVgvnn8vnZleAIynUzzICixXRcIW0qlb5bnWi7hcFkBrbOK5qkqVm5h5eEyjpsgHbHTz8eJcDEGleAw2syBDFfi3Mb4MB1eXd9ebIN++DYX4i3cd+kuuHT64u7z6+fyqg3RMODWYEXYmQYtlbrNF/jy4vjn76byDxIy2hgXoZGcqq4Ds8+Bft+e35/1cO+HWxry4PHvfI/HR8XfMflYpmTqBKYARtxj8+PH84n0H6xvCAVZPCJ4ZYWSWso1IjMFg8Hf276+ZHaRqIhI6D6w084gEfE6MlZWNBFAFovDDKDgvx5gnVs9VCd/XH86uzk9avCPx09Xl7T+v26fhyUDAHyRO4MlEgnwQiUlWGSsq/RThB1kIVBNruMwaB0R8+cCJFb4DnTzoX41Q4JixLpTDiAfE99oBCCNm0hB55w4K2Ya+9+aT2Ge9xNdfi+8vLn/4WRwIdFbsVaBvetNWErzg425fYMwSIDGCV2yzXuLesOK1OIL/6AR8z4YkIrl+AhKH9HuWTWfwUGPR4dMM4pNfvSbov4kjtjn+FVmawuuhCPDVAcGFyOK4BskmqAuWzqBhDoBl3DC2OgCArLRvIJ57tHA8Toes8Zr5Wn4GqV9AVVBtMKdaA46sxuHdIxuQbQtGOBRFoOtWHPg82lDoNXOqNWPXqWmGzAP2oYPpKk8WR1R6ZBkUtIUSzyP25yvnzoipcqxHPqK9qC6qe1Xr5GwujU2gHAUtinoyMcpuyc0fzm6vzy625SY1TyCKNY4rjYFU4vTwacmm4EoPlhwR7xHWMipQsc8PTERyW5GVWbEsWEhQrJ0iLHWI4ceyUVTQYdOOrBRgB0gX0oSilz3VrWXY2IIHadTaGllpshSesYxH4u7j+5sPm7a52zy4OPv35e3NNmNduVpFtAS0uwdVQWOA6gyMQVInstVQoJArwb4Tv6lKG0hX7MYwKTjBarM5o8kK+q4KDkEqCo7rPBurC/mslxYPWbKQwx1YDttM708i8Q9dqk9wkt7jr0icfGLguvPH65/JNNcPMk+sTsxMVioN2EyyNtya4lciSMUpax3WtHuiM5koO54FxNVYXQFcqsy4yh5UCs3EqgX2lnxZQOQuYMKA0KXYSkz2W+0o8DY0iGWeoyBW7+g5LtCXv+zi0GgQnmCznBT2RJh5tvD+Pau9Rh1fV67hx4I8z3NTo09B8xmBuJQKDyrX2KHB9+Bj8DUcKhoapHM7JotrTpfYlmfwLEqYpvQTQEPulT5skIccj1WuKglm9NMrHpdYKhATeLsAxIqiT+oRYyZXyoUciqFoxGWXLAsKX7Mcz/wo44Ujd6XtfgcJSuIcCBrYoMyDso0O4yZBmiHHNmCfEei+uIP/rja3YPFrpRzsWC9LO/RjEKZ4jTBBtfVnnMDBdQbH63HCGUIcsBBf/hK2ewnWsKGXGbH3EagFYnJtG72FohCAERNIrqNxo1cwxKsGQIsqjMIv5lYjC+5RAp8Gn5qRHhvM+KCWO+KPNCuGhy7v2+2TgrTWt1VC0EadKnK0UUW8PUy/QUzbIhGfnXKCHoYeqNcoXI8pqADO5zwz23eVoEmukelU/5ycNb1GDfOhlLRCKSvHlcIFIuGg+lGCqfpKlK5SVQX0aWjsXaqEXcK91DVW16R9L6G5dd0IruWz4UF73R/hYbQmN4IR/B1kFlE94c5K6egyThRgmroFQKnozJXw+D0SVqlz3/0RhMv9m2P8fIsfh5/YQJjsjIC2CMDPITiI3E/hGyF9BmW94ThVn4O1tOAT3irCmHwWEMkDbtQ7IfJ81UImS+6MfbyBzbPZrthvNrDZbzujv91AZ3cTNhiRF7HExV3QE1XEAvK8L6wmmcrT3onCDTo4MMnPwQ5iEqmQE3Wn8MA46BGX+gm36UfIw0is4DNpFKlV+4HztX9FdMnvTyH38G6gZ3Hk7StaL0i+68OobLj54yjrLAjGhs8P52fvr3dZNvunBOLVmfF6poS+GXnrlNB73xSLszynLdWv7VyesCxIMcLEHIn66gRHA2jESkIj5mFhfXGFCCXMFcXCPo/qCvGYOAPN/Y8V/3ANwDgoroaPCaEjNB+s3Dcd0+xYMUbPygCvye4b+2jfJNVfpiLxHcbf8TffIgmo5nf4TWdvI0FhCjC+emGNSagybozBvCt8oYelaEq/JlP41U+0gxHNRaWnlSySLA0Ow8buTBCnHIHrttq5rejb3tyoP/S3KO1x4H+4Uomatsa/sLmn8yZ1yt2kxatRKYZsjVeCrqRaUPX89SQzG7jw6NQaKBcBkQB38bXWV7h2/ac5mFF3/yNNtF8u18w5gPsE47a+IQhOiU+6muP1ZHdQdGvnxpDoYg6TwK2njgJvp67rUUR28GjvCgK+EyDAeidtDIx4T7nvcsj1kvoCgZFeORwclLFudRjx/PTI+xhinDrLujrQ1yb8lu0VCl8aqL4wVG33w5ZBq0mXQuhgKI5ap3w7UG/1dGNTL/StiyO8jhjuctXhC3ebPY+ww2Znaty4bbqJ21InqmiohuioqxFJBUMOz9Y9MQWMpliKuAiBh+lmuQO2mOHaDlHEcGgBvoL2qdbBaOduM3OJJfiEaIbdIGqs45t/842Oz8XHx2NUR617fHlbnzejxQnVz7UVvV78dZTSwsOh2iUQdrvxrtqutow0v0vL1a5arv6PWnLUtJJr3efKZZG4XmcC2tCwoVpdQEmUaRrU45kroy/3jj+nZ7zQKw6b/8LBH+gHf2Yl+y8cg7by'}
REFERENCE = "/tmp/sweep_prefill_reference.pt"


def given(heads, groups, width, counts, contexts, page, dtype, seed):
    import torch
    g = torch.Generator("cuda").manual_seed(seed)
    full = contexts is None
    contexts = contexts or [0] * len(counts)
    ends = [a + b for a, b in zip(counts, contexts)]
    start = torch.tensor([0, *counts], device="cuda").cumsum(0)
    if page:
        pages = -(-max(ends) // page)
        starts = torch.randperm(len(counts) * pages, device="cuda", generator=g).view(len(counts), pages) * page
        size, room = page, len(counts) * pages * page
    else:
        starts, size, room = start[:-1, None], max(counts), sum(counts)
    k, v = (torch.randn(room, groups, width, device="cuda", generator=g).to(getattr(torch, dtype)) for _ in "kv")
    q = (2 * torch.randn(sum(counts), heads, width, device="cuda", generator=g)).to(k.dtype)
    return (q, k, v, start, torch.tensor(contexts, device="cuda"), starts, size, width**-0.5), not full


def child(name, gpu, results):
    began = time.time()
    import torch, triton.language as tl
    from rlloop.numerics.kernels.triton import prefill_loads, launch

    def put(m, k, v):
        old = getattr(m, k)
        setattr(m, k, tl.constexpr(type(old.value)(v)) if isinstance(old, tl.constexpr) else type(old)(v))

    over = FORMS.get(name) or {}
    for k, v in over.items():
        if hasattr(prefill_loads, k):
            put(prefill_loads, k, v)
    from rlloop.numerics.kernels.triton import prefill
    for k, v in over.items():
        if hasattr(prefill, k):
            put(prefill, k, v)
        else:
            assert hasattr(prefill_loads, k), k
    from rlloop.numerics.kernels.triton import attention, decode
    print(over, flush=True)
    assert launch.gluon_runs(torch.device("cuda:0"))
    if name == "reference":
        attention._better_kernels = lambda device: (None, None)
    else:
        if name == "main":
            folder = tempfile.mkdtemp()
            for key, text in OLD.items():
                open(f"{folder}/{key}.py", "w").write(zlib.decompress(base64.b64decode(text)).decode())
            sys.path.insert(0, folder)
            import old_prefill as prefill
        prefill.FULL = True
        attention._better_kernels = lambda device: (decode, prefill)
    run = attention.attention
    with torch.inference_mode():
        cases = [given(*case, seed) for seed, case in enumerate(CHECKED)]
        if name == "reference":
            made = [[x.cpu() for x in run(*args, causal=causal)] for args, causal in cases]
            torch.save(made, REFERENCE + ".part")
            os.rename(REFERENCE + ".part", REFERENCE)
            return
        flash = None
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func as flash
        except Exception as error:
            print(name, "no FlashAttention 3:", repr(error)[:200], flush=True)
        # compile: the same forms at small sizes
        small = {(h, g, w, c > 0 or t > 1024, p) for h, g, w, s, t, c, p in TIMED}
        for h, g, w, long, p in sorted(small):
            run(*given(h, g, w, [1100 if long else 100] * 2, [0, 0], p, "bfloat16", 0)[0])
        for (h, g, w, counts, contexts, p, dtype) in CHECKED:
            n = 1100 if max(a + b for a, b in zip(counts, contexts or [0] * 99)) > 1024 else 100
            args, causal = given(h, g, w, [n, 64], None if contexts is None else [0, 0], p, dtype, 0)
            run(*args, causal=causal)
        torch.cuda.synchronize()
        compiled = time.time() - began
        while not os.path.exists(REFERENCE):
            time.sleep(0.2)
        with open(f"/tmp/sweep_prefill_gpu{gpu}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            bits, bad = torch.load(REFERENCE), []
            for at, ((args, causal), want) in enumerate(zip(cases, bits)):
                for repeat in range(2):
                    for kind, got, exact in zip(("out", "lse"), run(*args, causal=causal), want):
                        same = got.cpu().view(torch.uint8).eq(exact.view(torch.uint8)).all()
                        if not same:
                            bad.append(f"case {at} {kind}")
            json.dump({"compiled": compiled, "bad": sorted(set(bad))}, open(results, "w"))
            del cases, bits
            torch.cuda.empty_cache()
            rows = []
            for h, g, w, s, t, c, p in TIMED:
                args, _ = given(h, g, w, [t] * s, [c] * s, p, "bfloat16", 1)
                q, k, v = args[:3]
                work = 2e-12 * s * h * w * ((c + t) ** 2 - c * c)
                calls = {"ours": lambda: run(*args)}
                if flash is not None:
                    start = args[3].int()
                    if p:
                        kk, vv = (x.view(-1, p, g, w) for x in (k, v))
                        where = dict(seqused_k=torch.full((s,), c + t, dtype=torch.int32, device="cuda"), block_table=(args[5] // p).int().contiguous())
                    else:
                        kk, vv, where = k, v, dict(cu_seqlens_k=start)
                    calls["fa3"] = lambda: flash(q, kk, vv, max_seqlen_q=t, cu_seqlens_q=start, max_seqlen_k=c + t, causal=True, fa_version=3, **where)
                times = {key: [] for key in calls}
                for call in calls.values():
                    call(); call()
                torch.cuda.synchronize()
                n = max(2, int(10 / (work / 0.5 + 0.02)))  # about 10 ms
                clocks, zeros = {key: [] for key in calls}, None
                for _ in range(7):
                    for key, call in calls.items():
                        a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                        torch.cuda._sleep(200000 + 60000 * n)  # the host is ahead: launches do not count
                        a.record()
                        for _ in range(n):
                            call()
                        b.record()
                        torch.cuda._sleep(300000)  # cycles: tells the clock that the work left
                        c.record()
                        torch.cuda.synchronize()
                        times[key].append(a.elapsed_time(b) / n)
                        clocks[key].append(3e-1 / b.elapsed_time(c))  # GHz
                row = {key: work / statistics.median(each) * 1e3 for key, each in times.items()}
                row["clocks"] = {key: statistics.median(each) for key, each in clocks.items()}
                if t >= 8192:  # zeros need little power: what the clock costs
                    none = [x.zero_() for x in args[:3]]
                    for key, call in calls.items():
                        call()
                        each = []
                        for _ in range(5):
                            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                            torch.cuda._sleep(200000 + 60000 * n)
                            a.record()
                            for _ in range(n):
                                call()
                            b.record()
                            torch.cuda.synchronize()
                            each.append(a.elapsed_time(b) / n)
                        row["zeros " + key] = work / statistics.median(each) * 1e3
                rows.append(row)
                json.dump({"compiled": compiled, "bad": sorted(set(bad)), "rows": rows}, open(results, "w"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--only", nargs="+")
    p.add_argument("--kill", type=float, default=85)
    p.add_argument("--child", nargs=3)
    a = p.parse_args()
    if a.child:
        return child(*a.child)
    import torch
    gpus = torch.cuda.device_count()
    if os.path.exists(REFERENCE):
        os.remove(REFERENCE)
    folder, began, running = tempfile.mkdtemp(), time.time(), {}
    for at, name in enumerate(["reference", *(a.only or FORMS)]):
        gpu = at % gpus
        out = open(f"{folder}/{at}.log", "w")
        env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "2"}
        running[name] = (at, gpu, subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", name, str(gpu), f"{folder}/{at}.json"], stdout=out, stderr=out, env=env))
    while time.time() - began < a.kill and any(each[2].poll() is None for each in running.values()):
        time.sleep(0.5)
    head = [f"{h // g}q {s}x{t}" + (f"+{c}" if c else "") for h, g, w, s, t, c, _ in TIMED]
    print(f"{'TFLOP/s (of FA3 on the same GPU)':34s}" + "".join(f"{x:>15s}" for x in head))
    for name, (at, gpu, process) in running.items():
        killed = process.poll() is None
        if killed:
            process.kill()
        log = open(f"{folder}/{at}.log").read().strip()
        try:
            found = json.load(open(f"{folder}/{at}.json"))
        except Exception:
            found = {}
        if name == "reference":
            if process.returncode:
                print("reference failed:", log[-1500:])
            continue
        line = f"{name:25s} gpu {gpu}    "
        for row in found.get("rows", []):
            line += f"{row['ours']:8.0f} " + (f"({row['ours'] / row['fa3']:.3f})" if "fa3" in row else "")
        print(line)
        for key in ("ours", "fa3"):
            line = f"    {key}: GHz, cycles of a processor for 2 x 64 x 64 (1,024 of products), zeros TFLOP/s:"
            for row in found.get("rows", []):
                if key in row:
                    ghz = row["clocks"][key]
                    line += f"  {ghz:.2f} {4.194304 * 132 * ghz / row[key] * 1e3:.0f}"
                    line += f" {row['zeros ' + key]:.0f}" if "zeros " + key in row else ""
            print(line)
        bad = found.get("bad")
        print(f"    bits: {'not reached' if bad is None else 'all equal' if not bad else bad}; compiled {found.get('compiled', 0):.0f} s; {'KILLED' if killed else f'exit {process.returncode}'}")
        if process.returncode or killed:
            print("    " + log[-800:])
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
