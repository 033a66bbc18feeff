"""Short sentences in scripts that tokenisers for European languages break, for tests of text in any script."""

#: Language -> sentences. "emoji" is English with sequences of several characters that are one picture.
SENTENCES = {
    "th": [
        "แมวน้ำกินปลาในทะเล",
        "วันนี้ฝนตกหนักมาก",
        "ฉันชอบดื่มน้ำส้ม",
        "เด็กๆ เล่นอยู่ในสวน",
        "ขอบคุณที่ช่วยฉันเมื่อวานนี้",
    ],
    "ja": [
        "猫が窓のそばで寝ています。",
        "今日は とても寒いですね。",
        "「ありがとう」と彼は言った。",
        "ガラスのコップを買いました。",
        "駅まで歩いて十分です。",
    ],
    "ar": [
        "ذهبَ الولدُ إلى المدرسة، ثم عاد.",
        "أحبُّ قراءةَ الكتب في المساء.",
        "هل تريدين قهوة أم شايًا؟",
        "السماء زرقاء اليوم.",
        "اشترت أمي خبزًا وحليبًا.",
    ],
    "hi": [
        "हिन्दी में एक छोटा वाक्य है।",
        "बच्चे बगीचे में खेल रहे हैं।",
        "क्या आप चाय पीना चाहते हैं?",
        "मेरी बहन दिल्ली में रहती है।",
        "कल बहुत तेज़ बारिश हुई।",
    ],
    "emoji": [
        "our family 👨‍👩‍👧‍👦 is here ❤️",
        "well done 👍🏽 my friend 🎉",
        "she is a pilot 👩🏾‍✈️ now",
        "greetings from Greece 🇬🇷 and Iran 🇮🇷",
        "a rainbow 🏳️‍🌈 after the rain 🌧️",
    ],
}
